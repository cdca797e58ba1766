"""Builds what the emulator needs, and kernels, into a folder of its own: see README.md."""
import hashlib, os, subprocess, sys

HERE = os.path.dirname(os.path.abspath(__file__))
FLAGS = ["-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-fwrapv", "-w", "-fPIC", "-shared", "-I" + HERE]
RUNTIME = ["runtime.c", "warp.c", "async.c", "matrix.c"]


def folder():
    """Where everything is built."""
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "dacapo-emulator")
    path = os.environ.get("DACAPO_EMULATOR_CACHE") or default
    os.makedirs(path, exist_ok=True)
    return path


def digest(*parts):
    return hashlib.sha256(b"\0".join(p if isinstance(p, bytes) else p.encode() for p in parts)).hexdigest()[:24]


def read(path):
    with open(path, "rb") as file:
        return file.read()


def write(path, text):
    with open("%s.%d" % (path, os.getpid()), "w") as file:
        file.write(text)
    os.rename(file.name, path)


def cc(output, arguments):
    """Compiles into a file that appears whole or not at all."""
    aside = "%s.%d" % (output, os.getpid())
    subprocess.run(["cc", "-o", aside] + FLAGS + arguments, check=True)
    os.rename(aside, output)
    return output


def runtime():
    """The runtime as a library."""
    texts = [read(os.path.join(HERE, n)) for n in RUNTIME + ["device.h", "runtime.h"]]
    path = os.path.join(folder(), "runtime-%s.so" % digest(*texts))
    if not os.path.exists(path):
        cc(path, ["-O3"] + [os.path.join(HERE, n) for n in RUNTIME] + ["-lm", "-ldl"])
    return path


def kernel(ptx):
    """A module of PTX as a library."""
    translator = ("ptx.py", "arithmetic.py", "collectives.py", "translate.py")
    index = os.path.join(folder(), "module-%s" % digest(ptx, *[read(os.path.join(HERE, n)) for n in translator]))
    if not os.path.exists(index):
        sys.path.insert(0, HERE)
        from translate import translate
        text = translate(ptx)
        name = digest(text)
        write(os.path.join(folder(), "kernel-%s.c" % name), text)
        write(index, name)
    source = os.path.join(folder(), "kernel-%s.c" % read(index).decode())
    # The same C with the same header is the same library.
    library = "%s-%s.so" % (source[:-2], digest(read(os.path.join(HERE, "device.h")))[:8])
    return library if os.path.exists(library) else cc(library, ["-O1", source])


def nvrtc():
    """The real NVRTC, for its wrapper."""
    sys.path.insert(0, os.path.join(HERE, "../../tools/gpu"))
    import compile as gpu_compile
    return gpu_compile.find_nvrtc()


def driver():
    """A folder with libcuda.so.1 and, in lib64, NVRTC and cuBLASLt."""
    names = ["build.py", "driver.c", "driver.h", "build.h", "nvrtc.c", "cublaslt.c"]
    real, beneath = nvrtc(), runtime()
    path = os.path.join(folder(), "driver-%s" % digest(real, beneath, HERE, *[read(os.path.join(HERE, n)) for n in names]))
    if not os.path.exists(path + "/ready"):
        os.makedirs(path + "/lib64", exist_ok=True)
        source = lambda name: os.path.join(HERE, name)
        define = lambda name, value: '-D%s="%s"' % (name, value)
        cuda = cc(path + "/libcuda.so.1", ["-O2", define("HERE", HERE), define("RUNTIME", beneath), source("driver.c"), beneath,
                                           "-Wl,-soname,libcuda.so.1", "-lpthread", "-ldl"])
        cc(path + "/lib64/libnvrtc.so.13", ["-O2", define("REAL", real), define("HERE", HERE), source("nvrtc.c"), "-ldl"])
        # Not -ffast-math: with it, loading the library would switch subnormal numbers off.
        cc(path + "/lib64/libcublasLt.so.13", ["-O3", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", source("cublaslt.c"), cuda])
        with open(path + "/ready", "w"):
            pass
    return path


def environment():
    """Settings under which a program finds the emulated GPU."""
    path = driver()
    known = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": path + (":" + known if known else ""), "CUDA_HOME": path, "DACAPO_TEST_DEVICE": "cuda",
            "DACAPO_EMULATOR_PYTHON": sys.executable}


if __name__ == "__main__":
    if sys.argv[1] == "env":
        for name, value in environment().items():
            print("export %s='%s'" % (name, value))
    else:
        # The driver has a module translated.
        print(kernel(read(sys.argv[1]).decode()))
