// Shows why one test of loops needs one connection under `memcheck` (see `check`): memcheck loses
// the context of this correct program, which runs nothing concurrently. One stream, four graphs
// `begin, while (condition) { work, next }`, each launched and waited for in its turn; the kernel
// of each needs more local memory than the one before.
//
//   nvcc -O2 -arch=sm_90 -o checked_loops checked_loops.cu
//   ./checked_loops                                                                     ok
//   compute-sanitizer --tool memcheck ./checked_loops                                   cudaErrorIllegalAddress
//   compute-sanitizer --tool memcheck ./checked_loops first                             ok
//   CUDA_DEVICE_MAX_CONNECTIONS=1 compute-sanitizer --tool memcheck ./checked_loops     ok
//
// With `first` the kernel that needs most runs once before any graph is made, so that local memory never has to grow.
// (Driver 580, CUDA 13.0.)
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>

#define MUST(call)                                                                                                     \
    do {                                                                                                               \
        cudaError_t error = (call);                                                                                    \
        if (error != cudaSuccess) {                                                                                    \
            printf("FAILED: %s: %s\n", #call, cudaGetErrorName(error));                                                \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static const unsigned LENGTH = 64 * 256, ROUNDS = 8;

template <unsigned WORDS> __global__ void work(unsigned *data) {
    unsigned local[WORDS];
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    for (unsigned i = 0; i < WORDS; ++i) local[i] = data[(at + i) % LENGTH];
    for (unsigned i = 0; i < WORDS; ++i) local[local[i] % WORDS] += i;
    unsigned sum = 0;
    for (unsigned i = 0; i < WORDS; ++i) sum += local[i];
    data[at] = sum;
}

__global__ void begin(unsigned *left, cudaGraphConditionalHandle again) {
    *left = ROUNDS;
    cudaGraphSetConditional(again, 1);
}

__global__ void next(unsigned *left, cudaGraphConditionalHandle again) {
    *left -= 1;
    cudaGraphSetConditional(again, *left > 0);
}

static cudaGraphNode_t add(cudaGraph_t graph, cudaGraphNode_t *after, void *kernel, unsigned blocks, unsigned threads, void **args) {
    cudaKernelNodeParams params = {};
    params.func = kernel;
    params.gridDim = dim3(blocks);
    params.blockDim = dim3(threads);
    params.kernelParams = args;
    cudaGraphNode_t node;
    MUST(cudaGraphAddKernelNode(&node, graph, after, after ? 1 : 0, &params));
    return node;
}

static cudaGraphExec_t loop(void *kernel, unsigned *data, unsigned *left) {
    cudaGraph_t graph;
    MUST(cudaGraphCreate(&graph, 0));
    cudaGraphConditionalHandle again;
    MUST(cudaGraphConditionalHandleCreate(&again, graph, 0, 0));
    void *word_args[] = {&left, &again}, *data_args[] = {&data};
    cudaGraphNode_t first = add(graph, nullptr, (void *)begin, 1, 1, word_args), repeated;
    cudaGraphNodeParams params = {};
    params.type = cudaGraphNodeTypeConditional;
    params.conditional.handle = again;
    params.conditional.type = cudaGraphCondTypeWhile;
    params.conditional.size = 1;
    MUST(cudaGraphAddNode(&repeated, graph, &first, nullptr, 1, &params));
    cudaGraph_t body = params.conditional.phGraph_out[0];
    cudaGraphNode_t worked = add(body, nullptr, kernel, LENGTH / 256, 256, data_args);
    add(body, &worked, (void *)next, 1, 1, word_args);
    cudaGraphExec_t exec;
    MUST(cudaGraphInstantiate(&exec, graph, 0));
    return exec;
}

int main(int count, char **words) {
    unsigned *data, *left;
    MUST(cudaMalloc(&data, LENGTH * sizeof(unsigned)));
    MUST(cudaMalloc(&left, sizeof(unsigned)));
    MUST(cudaMemset(data, 1, LENGTH * sizeof(unsigned)));
    if (count > 1 && !strcmp(words[1], "first")) work<2048><<<LENGTH / 256, 256>>>(data);
    MUST(cudaDeviceSynchronize());
    cudaStream_t stream;
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    void *kernels[] = {(void *)work<32>, (void *)work<128>, (void *)work<512>, (void *)work<2048>};
    cudaGraphExec_t graphs[4];
    for (int at = 0; at < 4; ++at) graphs[at] = loop(kernels[at], data, left);
    for (int launch = 0; launch < 20; ++launch) {
        for (cudaGraphExec_t graph : graphs) {
            MUST(cudaGraphLaunch(graph, stream));
            MUST(cudaStreamSynchronize(stream));
        }
    }
    unsigned rest = 1;
    MUST(cudaMemcpy(&rest, left, sizeof(rest), cudaMemcpyDeviceToHost));
    printf(rest == 0 ? "ok\n" : "FAILED: rounds are missing\n");
    return rest != 0;
}
