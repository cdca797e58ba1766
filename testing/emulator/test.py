"""Checks the emulator: kernels of the tree against numpy, and bugs planted on purpose, which must be found. Prints why it checks
nothing where NVRTC or a C compiler is missing."""
import os, shutil, sys

try:
    import numpy
    from run import *
    gpu_compile.Nvrtc()
except (ImportError, OSError) as problem:
    print("skipped: the emulator needs numpy and NVRTC (%s)" % problem)
    sys.exit(0)
if not shutil.which("cc"):
    print("skipped: the emulator needs a C compiler")
    sys.exit(0)

RANDOM = np.random.default_rng(1)
KERNELS = gpu_compile.KERNELS


def key(entry, source=None, **defines):
    return {"source": source or entry, "entry": entry, "defines": [[n, str(v)] for n, v in defines.items()]}


def close(got, want, what):
    worst = np.abs(got - want).max()
    assert worst <= np.abs(want).max() / 128, "%s: off by %g of %g" % (what, worst, np.abs(want).max())


def norm():
    x, w, y = bf16(RANDOM.standard_normal((4, 512))), bf16(RANDOM.standard_normal(512)), empty(4 * 512, np.uint16)
    launch(key("rms_norm", XT=2, WT=2, YT=2, ALIGNED=1), 4, 256, 0, [x, w, y, 512, 512, 512, 1e-6])
    v = f32_of(x).reshape(4, 512)
    close(f32_of(y).reshape(4, 512), v / np.sqrt((v * v).mean(1, keepdims=True) + 1e-6) * f32_of(w), "rms_norm")


def linear(k, n, rows, wide, split):
    """Tensor copies, warp group products and clusters."""
    x, w = bf16(RANDOM.standard_normal((rows, k))), bf16(RANDOM.standard_normal((n, k)) / k ** 0.5)
    added, y = bf16(RANDOM.standard_normal((rows, n))), empty(rows * n, np.uint16)
    maps = [tensor_map(x, [k, rows], [2 * k], [64, rows], 128), tensor_map(w, [k, n], [2 * k], [64, wide], 128)]
    kernel = key("linear_wgmma", K=k, N=n, ROWS=rows, WIDE=wide, COLUMNS=rows, STAGES=4, SPLIT=split, TYPE=2, BT=2, RT=2, YT=2, BIAS=0,
                 EPILOGUE=1, LIVE=0, PAIRS=1, CONSUMES=0, PRODUCES=0, NT=2)
    launch(kernel, -(-n // wide) * split, 160, 4 * (wide + rows) * 128 + 1024,
           [*maps, None, added, y, None, None, None, None, n, n, 0.0], cluster=(split, 1, 1))
    want = f32_of(x).reshape(rows, k) @ f32_of(w).reshape(n, k).T + f32_of(added).reshape(rows, n)
    close(f32_of(y).reshape(rows, n), want, "linear_wgmma")


def planted(bug, blocks=3, dependent=False):
    """The sums of a kernel with this bug, after one that is right."""
    gpu_compile.KERNELS = HERE
    try:
        x, y, sums = aligned(np.arange(32, dtype=np.float32)), empty(blocks), empty(32)
        launch(key("planted", BUG=0), 1, 32, 0, [x, sums, np.zeros(1, np.uint32)])
        launch(key("planted", BUG=bug), blocks, 32, 0, [sums if dependent else x, y, np.zeros(1, np.uint32)], dependent=dependent)
        return y
    finally:
        gpu_compile.KERNELS = KERNELS


def found(bug, words, **more):
    try:
        planted(bug, **more)
    except EmulatorError as problem:
        assert words in str(problem), "planted bug %d: %s" % (bug, problem)
        return
    raise AssertionError("planted bug %d was not found" % bug)


def main():
    norm()
    linear(256, 100, 32, 64, 1)
    linear(512, 100, 40, 64, 2)
    assert (planted(0) == 496).all()
    os.environ["DACAPO_EMULATOR_DEPENDENT"] = "1"
    found(1, "before griddepcontrol.wait, while planted", dependent=True)
    assert (planted(0, dependent=False) == 496).all()
    del os.environ["DACAPO_EMULATOR_DEPENDENT"]
    found(2, "deadlock")
    found(3, "out of bounds")
    assert np.isnan(planted(4)).all() and np.isnan(planted(5)).all(), "memory that was not written was taken for numbers"
    found(6, "shared access of 4 bytes")
    found(7, "deadlock")
    os.environ["DACAPO_EMULATOR_RESIDENT"] = "2"
    found(0, "2 resident at most")
    for seed in range(1, 4):
        os.environ.update(DACAPO_EMULATOR_SEED=str(seed), DACAPO_EMULATOR_RESIDENT="3")
        assert (planted(0) == 496).all()
    print("the emulator passed")


if __name__ == "__main__":
    main()
