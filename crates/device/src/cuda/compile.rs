//! Compiles a kernel's key to a cubin with NVRTC: no file on disk, no toolkit, no headers but our own.

use super::api::{NvrtcApi, Program};
use super::launch::KernelKey;
use super::library::{self, Found, Loaded};
use super::source;
use crate::{Error, Result, notice};
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;

/// The result of a compilation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// Machine code for exactly one architecture.
    pub cubin: Vec<u8>,
    /// The entry executes `griddepcontrol.wait`, so it may be launched dependently.
    pub waits: bool,
}

/// A run-time compiler that was found.
#[derive(Clone, Copy, Debug)]
pub struct Compiler {
    nvrtc: &'static Loaded<NvrtcApi>,
}

impl Compiler {
    /// The machine's NVRTC.
    pub fn find() -> Result<Compiler> {
        Ok(Compiler { nvrtc: library::nvrtc()? })
    }

    /// An NVRTC in one of these folders. It stays loaded until the process ends.
    pub fn find_in(folders: &[PathBuf]) -> Result<Compiler> {
        Ok(Compiler { nvrtc: Box::leak(Box::new(library::nvrtc_in(folders)?)) })
    }

    /// Which library it is.
    pub fn found(&self) -> &'static Found {
        &self.nvrtc.found
    }

    /// The options a key is compiled with; together with the sources and the version they decide the cubin.
    pub fn options(key: &KernelKey, arch: &str) -> Vec<String> {
        let mut options = vec![
            format!("--gpu-architecture={arch}"),
            "--std=c++17".into(),
            "--generate-line-info".into(),
        ];
        options.extend(
            key.defines.iter().map(|(name, value)| format!("--define-macro={name}={value}")),
        );
        options
    }

    /// Compiles one kernel.
    pub fn compile(&self, key: &KernelKey, arch: &str) -> Result<Compiled> {
        let files = source::closure(&key.source)?;
        let (main, headers) = files.split_first().expect("the closure holds the file itself");
        self.compile_text(key, arch, main.1, headers)
    }

    fn compile_text(
        &self,
        key: &KernelKey,
        arch: &str,
        text: &str,
        headers: &[(&str, &str)],
    ) -> Result<Compiled> {
        let c = |text: &str| CString::new(text).expect("sources and options hold no NUL");
        let (text, name) = (c(text), c(&format!("{}.cu", key.source)));
        let texts: Vec<CString> = headers.iter().map(|(_, text)| c(text)).collect();
        let names: Vec<CString> = headers.iter().map(|(name, _)| c(name)).collect();
        let options: Vec<CString> = Self::options(key, arch).iter().map(|o| c(o)).collect();
        let pointers = |strings: &[CString]| -> Vec<*const c_char> {
            strings.iter().map(|s| s.as_ptr()).collect()
        };
        let (texts, names, options) = (pointers(&texts), pointers(&names), pointers(&options));
        let api = &self.nvrtc.api;
        let mut program = Handle { api, program: std::ptr::null_mut() };
        // SAFETY: all strings outlive the call; counts match the arrays.
        unsafe {
            api.nvrtcCreateProgram(
                &mut program.program,
                text.as_ptr(),
                name.as_ptr(),
                names.len() as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            )
        }?;
        // SAFETY: the program was created above; options outlive the call.
        let outcome = unsafe {
            api.nvrtcCompileProgram(program.program, options.len() as c_int, options.as_ptr())
        };
        if let Err(problem) = outcome {
            let log = program.log()?;
            let kernel = format!("{}::{} for {arch}", key.source, key.entry);
            return Err(Error::Compile { kernel, log: format!("{problem}\n{log}") });
        }
        let ptx = program.bytes(NvrtcApi::nvrtcGetPTXSize, NvrtcApi::nvrtcGetPTX)?;
        let cubin = program.bytes(NvrtcApi::nvrtcGetCUBINSize, NvrtcApi::nvrtcGetCUBIN)?;
        let waits = entry_waits(&String::from_utf8_lossy(&ptx), &key.entry).ok_or_else(|| {
            Error::Compile {
                kernel: format!("{}::{}", key.source, key.entry),
                log: format!("the source has no entry `{}`", key.entry),
            }
        })?;
        Ok(Compiled { cubin, waits })
    }
}

/// Whether the entry's own code waits for its predecessor; `None` if there is no such entry.
fn entry_waits(ptx: &str, entry: &str) -> Option<bool> {
    let head = format!(".entry {entry}(");
    let start = ptx.find(&head)? + head.len();
    let body = &ptx[start..];
    let body = &body[..body.find(".entry ").unwrap_or(body.len())];
    Some(body.contains("griddepcontrol.wait"))
}

struct Handle<'a> {
    api: &'a NvrtcApi,
    program: Program,
}

type SizeCall = unsafe fn(&NvrtcApi, Program, *mut usize) -> Result<()>;
type BytesCall = unsafe fn(&NvrtcApi, Program, *mut c_char) -> Result<()>;

impl Handle<'_> {
    fn bytes(&self, size: SizeCall, get: BytesCall) -> Result<Vec<u8>> {
        let mut len = 0;
        // SAFETY: the program lives; one size is written.
        unsafe { size(self.api, self.program, &mut len) }?;
        let mut bytes = vec![0u8; len.max(1)];
        // SAFETY: the buffer has the size just asked for.
        unsafe { get(self.api, self.program, bytes.as_mut_ptr().cast()) }?;
        bytes.truncate(len);
        Ok(bytes)
    }

    fn log(&self) -> Result<String> {
        let bytes = self.bytes(NvrtcApi::nvrtcGetProgramLogSize, NvrtcApi::nvrtcGetProgramLog)?;
        let text = CStr::from_bytes_until_nul(&bytes).map(CStr::to_string_lossy);
        Ok(text.map(|text| text.into_owned()).unwrap_or_default())
    }
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        if self.program.is_null() {
            return;
        }
        // SAFETY: created once, destroyed once.
        if let Err(problem) = unsafe { self.api.nvrtcDestroyProgram(&mut self.program) } {
            notice::say(format_args!("{problem}"));
        }
    }
}
