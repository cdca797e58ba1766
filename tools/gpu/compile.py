"""Compiles kernels with NVRTC and prints the resources of each.

compile.py KEYS.json [--arch sm_90a,sm_80,sm_100a] [--out FOLDER] [--only TEXT]
KEYS.json is a list of {"source", "entry", "defines": [[name, value], ...]}, or the output of `lowered_step`.
"""
import argparse, ctypes, glob, hashlib, json, multiprocessing, os, re, sys

HERE = os.path.dirname(os.path.abspath(__file__))
KERNELS = os.environ.get("DACAPO_KERNELS", os.path.join(HERE, "../../crates/device/src/kernels"))


def find_nvrtc():
    if "NVRTC" in os.environ:
        return os.environ["NVRTC"]
    for folder in sys.path + ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib"]:
        for pattern in ("nvidia/cu13/lib/libnvrtc.so.1?", "nvidia/cuda_nvrtc/lib/libnvrtc.so.1?", "libnvrtc.so.1?"):
            found = sorted(glob.glob(os.path.join(folder, pattern)))
            if found:
                return found[-1]
    return "libnvrtc.so.13"


class Nvrtc:
    def __init__(self):
        path = find_nvrtc()
        # The compiler opens its builtins by name, so loading them is enough.
        for builtins in glob.glob(os.path.join(os.path.dirname(path), "libnvrtc-builtins.so*")):
            ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
        self.lib = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)

    def program(self, key, arch, *more):
        """(program, log) of a kernel that was compiled; raises with the compiler's message."""
        texts = {os.path.basename(p): open(p, "rb").read() for p in glob.glob(KERNELS + "/*.cu*")}
        name = key["source"] + ".cu"
        headers = [n for n in texts if n.endswith(".cuh")]
        prog = ctypes.c_void_p()
        arr = lambda xs: (ctypes.c_char_p * len(xs))(*xs)
        self.check(self.lib.nvrtcCreateProgram(ctypes.byref(prog), texts[name], name.encode(), len(headers),
                                               arr([texts[h] for h in headers]), arr([h.encode() for h in headers])))
        options = ["--gpu-architecture=" + arch, "--std=c++17", "--generate-line-info", *more]
        options += ["--define-macro=%s=%s" % (n, v) for n, v in key["defines"]]
        code = self.lib.nvrtcCompileProgram(prog, len(options), arr([o.encode() for o in options]))
        log = self.text(prog, "ProgramLog").split(b"\0")[0].decode()
        if code:
            raise RuntimeError("%s for %s:\n%s" % (name, arch, log))
        return prog, log

    def text(self, prog, what):
        size = ctypes.c_size_t()
        self.check(getattr(self.lib, "nvrtcGet%sSize" % what)(prog, ctypes.byref(size)))
        text = ctypes.create_string_buffer(size.value)
        self.check(getattr(self.lib, "nvrtcGet" + what)(prog, text))
        return text.raw

    def compile(self, key, arch):
        """(cubin, log)."""
        prog, log = self.program(key, arch, "--ptxas-options=-v")
        cubin = self.text(prog, "CUBIN")
        self.lib.nvrtcDestroyProgram(ctypes.byref(prog))
        return cubin, log

    def ptx(self, key, arch):
        """The PTX for a virtual architecture, `compute_90a`."""
        prog, _ = self.program(key, arch)
        text = self.text(prog, "PTX").split(b"\0")[0].decode()
        self.lib.nvrtcDestroyProgram(ctypes.byref(prog))
        return text

    def cached(self, key, arch, folder):
        """The cubin, from `folder` if it was compiled from the same sources before."""
        texts = b"".join(open(p, "rb").read() for p in sorted(glob.glob(KERNELS + "/*.cuh")) + [KERNELS + "/%s.cu" % key["source"]])
        name = hashlib.sha256(texts + json.dumps([key, arch]).encode()).hexdigest()[:24]
        path = os.path.join(folder, name + ".cubin")
        if not os.path.exists(path):
            os.makedirs(folder, exist_ok=True)
            cubin = self.compile(key, arch)[0]
            open(path, "wb").write(cubin)
        return open(path, "rb").read()

    def check(self, code):
        if code:
            raise RuntimeError("NVRTC error %d" % code)


def compiled(key):
    Nvrtc().cached(key, "sm_90a", os.environ.get("CUBINS", "/tmp/cubins"))


def compile_all(keys):
    """Fills the folder CUBINS on all cores, before the GPU is asked for anything."""
    with multiprocessing.Pool() as pool:
        pool.map(compiled, list({json.dumps(key): key for key in keys}.values()), chunksize=1)


def usage(log, entry):
    part = log[log.find("Compiling entry function '%s'" % entry):]
    get = lambda p: int((re.search(p, part) or [0, 0])[1])
    return dict(registers=get(r"Used (\d+) registers"), stack=get(r"(\d+) bytes stack"), spills=get(r"(\d+) bytes spill stores"),
                shared=get(r"(\d+) bytes smem"))


def keys_of(path):
    data = json.load(open(path))
    if isinstance(data, list):
        return data
    return [l["launch"]["kernel"] for n in data["nodes"] for l in n["lowered"] if "launch" in l]


def main():
    a = argparse.ArgumentParser()
    a.add_argument("keys")
    a.add_argument("--arch", default="sm_90a")
    a.add_argument("--out")
    a.add_argument("--only", default="")
    a.add_argument("--quiet", action="store_true", help="print nothing, only fill the folder")
    a = a.parse_args()
    nvrtc, seen, bad = Nvrtc(), set(), 0
    for key in keys_of(a.keys):
        text = json.dumps(key)
        if text in seen or a.only not in text:
            continue
        seen.add(text)
        for arch in a.arch.split(","):
            label = "%-18s %-8s %s" % (key["entry"], arch, " ".join("%s=%s" % tuple(d) for d in key["defines"])[:150])
            try:
                if a.quiet:
                    nvrtc.cached(key, arch, a.out)
                    continue
                cubin, log = nvrtc.compile(key, arch)
            except RuntimeError as e:
                print(label, "FAILED\n", e)
                bad += 1
                continue
            print(label, usage(log, key["entry"]), " ".join(l for l in log.splitlines() if "warning" in l)[:200])
            if a.out:
                nvrtc.cached(key, arch, a.out)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
