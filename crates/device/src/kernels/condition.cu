// The node before a conditional node: copies a word of the arena into the condition. The driver provides the
// function; it is resolved when the code is loaded.
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned value);

extern "C" __global__ void set_condition(unsigned long long handle, const unsigned* word) {
    cudaGraphSetConditional(handle, *(const volatile unsigned*)word != 0u ? 1u : 0u);
}
