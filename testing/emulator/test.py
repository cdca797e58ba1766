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


def adapters(k, n, wide, split, parts, rank, of):
    """Warps of a linear that add what adapters do, beside the ring; the second launch finds the counters of the first."""
    rows, slots, inner = len(of), 3, parts * rank
    x, w = bf16(RANDOM.standard_normal((rows, k))), bf16(RANDOM.standard_normal((n, k)) / k ** 0.5)
    a, b = bf16(RANDOM.standard_normal((slots, parts, rank, k)) / k ** 0.5), bf16(RANDOM.standard_normal((slots, n, rank)) / rank ** 0.5)
    maps = [tensor_map(x, [k, rows], [2 * k], [64, rows], 128), tensor_map(w, [k, n], [2 * k], [64, wide], 128)]
    kernel = key("linear_wgmma", K=k, N=n, ROWS=rows, WIDE=wide, COLUMNS=rows, STAGES=4, SPLIT=split, TYPE=2, BT=2, RT=2, YT=2, BIAS=0,
                 EPILOGUE=0, LIVE=0, PAIRS=1, CONSUMES=0, PRODUCES=0, ADAPTERS=slots, RANK=rank, PARTS=parts, ALTERNATE=0, SLICES=8,
                 PARAM_WORDS=4, PARAM_ADAPTER=1)
    words = lambda values: aligned(np.asarray(values, np.uint32))
    params = np.full((rows, 4), 99)
    params[::-1, 1] = of
    counters, sums = words(np.zeros(2 + rows * inner // 16)), empty(8 * rows * inner + rows * inner // 2)
    state, ends = [words(range(rows)), words(range(rows)[::-1]), words(params)], [n // 2, n]
    want = f32_of(x).reshape(rows, k) @ f32_of(w).reshape(n, k).T
    for row, adapter in enumerate(of):
        if adapter:
            products = f32_of(a).reshape(slots, parts, rank, k)[adapter - 1] @ f32_of(x).reshape(rows, k)[row]
            want[row] += (f32_of(b).reshape(slots, n, rank)[adapter - 1] * products[np.arange(n) * parts // n]).sum(1)
    for _ in range(2):
        y = empty(rows * n, np.uint16)
        launch(kernel, -(-n // wide) * split, 256, 4 * (wide + rows) * 128 + 1024,
               [*maps, None, None, y, None, None, None, None, n, n, 0.0, x, a, b, sums, counters, *state, k, rows, rows, 0, *ends],
               cluster=(split, 1, 1))
        close(f32_of(y).reshape(rows, n), want, "linear_wgmma with adapters")
        assert not counters.any(), "counters of adapters are not zero"


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
    adapters(256, 96, 48, 1, 2, 16, [0, 3, 1, 3, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 0])
    adapters(512, 64, 64, 2, 1, 32, [2, 0, 0, 3, 0, 0, 0, 0])
    adapters(256, 96, 48, 1, 2, 16, [0] * 16)
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
