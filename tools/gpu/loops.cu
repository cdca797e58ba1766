// Does the driver bear graphs with loops on several streams at once? Nothing of Dacapo is in here: each thread has a
// stream, its own memory and a graph `begin, while (condition) { work, next }`, launches it and waits, over and over.
// (What was seen with Dacapo's own graphs is in docs/kernel-log.md under "Loops".)
//
//   nvcc -O2 -arch=sm_90 -o loops loops.cu
//   ./loops THREADS LAUNCHES ROUNDS KERNELS [apart]     for example ./loops 8 20000 8 12
//   compute-sanitizer --tool memcheck ./loops 8 200 8 12
//
// KERNELS is the number of `work` nodes of a round. With `apart` no two streams run a loop at once. Prints one line; fails when
// a call fails or a round is missing.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <mutex>
#include <thread>
#include <vector>

// Ends all threads at once: what others say after the first failure means nothing.
static void fail(const char *what, const char *why) {
    printf("FAILED: %s: %s\n", what, why);
    fflush(stdout);
    std::_Exit(1);
}

#define MUST(call)                                                                                                     \
    do {                                                                                                               \
        cudaError_t error = (call);                                                                                    \
        if (error != cudaSuccess) fail(#call, cudaGetErrorName(error));                                                \
    } while (0)

// Some work in local memory: where each thread keeps it is the driver's business.
__global__ void work(unsigned *data, unsigned length, unsigned salt) {
    unsigned local[32];
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    for (unsigned i = 0; i < 32; ++i) local[i] = data[(at + i) % length] + salt;
    for (unsigned i = 0; i < 32; ++i) local[local[i] % 32] += i;
    unsigned sum = 0;
    for (unsigned i = 0; i < 32; ++i) sum += local[i];
    if (at < length) data[at] = sum;
}

__global__ void begin(unsigned *left, unsigned rounds, cudaGraphConditionalHandle again) {
    *left = rounds;
    cudaGraphSetConditional(again, rounds > 0);
}

__global__ void next(unsigned *left, unsigned *done, cudaGraphConditionalHandle again) {
    *done += 1;
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

static void live(unsigned thread, unsigned launches, unsigned rounds, unsigned kernels, std::mutex *apart) {
    const unsigned length = 64 * 256;
    unsigned *data, *words;
    MUST(cudaMalloc(&data, length * sizeof(unsigned)));
    MUST(cudaMalloc(&words, 2 * sizeof(unsigned)));
    MUST(cudaMemset(words, 0, 2 * sizeof(unsigned)));
    unsigned *left = words, *done = words + 1;
    cudaStream_t stream;
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    MUST(cudaDeviceSynchronize());

    cudaGraph_t graph;
    MUST(cudaGraphCreate(&graph, 0));
    cudaGraphConditionalHandle again;
    MUST(cudaGraphConditionalHandleCreate(&again, graph, 0, 0));
    void *begin_args[] = {&left, &rounds, &again};
    cudaGraphNode_t first = add(graph, nullptr, (void *)begin, 1, 1, begin_args);
    cudaGraphNodeParams loop = {};
    loop.type = cudaGraphNodeTypeConditional;
    loop.conditional.handle = again;
    loop.conditional.type = cudaGraphCondTypeWhile;
    loop.conditional.size = 1;
    cudaGraphNode_t repeated;
    MUST(cudaGraphAddNode(&repeated, graph, &first, nullptr, 1, &loop));
    cudaGraph_t body = loop.conditional.phGraph_out[0];
    cudaGraphNode_t last = nullptr;
    for (unsigned kernel = 0; kernel < kernels; ++kernel) {
        unsigned salt = thread * 1000 + kernel, size = length;
        void *args[] = {&data, &size, &salt};
        last = add(body, last ? &last : nullptr, (void *)work, 64, 256, args);
    }
    void *next_args[] = {&left, &done, &again};
    add(body, last ? &last : nullptr, (void *)next, 1, 1, next_args);
    cudaGraphExec_t exec;
    MUST(cudaGraphInstantiate(&exec, graph, 0));

    for (unsigned launch = 0; launch < launches; ++launch) {
        std::unique_lock<std::mutex> turn;
        if (apart) turn = std::unique_lock<std::mutex>(*apart);
        MUST(cudaGraphLaunch(exec, stream));
        MUST(cudaStreamSynchronize(stream));
    }
    unsigned counted = 0;
    MUST(cudaMemcpy(&counted, done, sizeof(counted), cudaMemcpyDeviceToHost));
    if (counted != launches * rounds) fail("rounds", "not as many as were asked for");
}

int main(int count, char **words) {
    if (count < 5) {
        printf("usage: loops THREADS LAUNCHES ROUNDS KERNELS [apart]\n");
        return 2;
    }
    unsigned threads = atoi(words[1]), launches = atoi(words[2]), rounds = atoi(words[3]), kernels = atoi(words[4]);
    bool apart = count > 5 && !strcmp(words[5], "apart");
    std::mutex one;
    std::vector<std::thread> lives;
    for (unsigned thread = 0; thread < threads; ++thread) lives.emplace_back(live, thread, launches, rounds, kernels, apart ? &one : nullptr);
    for (auto &thread : lives) thread.join();
    printf("ok: %u threads, %u launches each, %u rounds of %u kernels%s\n", threads, launches, rounds, kernels, apart ? ", apart" : "");
    return 0;
}
