// What of CUDA kernels.cu uses, for a plain C++17 compiler: threads run one after the other.
#pragma once
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline

struct HostIndex {
    unsigned int x;
};
static thread_local HostIndex threadIdx, blockIdx, blockDim, gridDim;

inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
    const unsigned long long before = *at;
    *at += value;
    return before;
}

// Runs a kernel's threads in rising or falling order: a kernel that depends on the order gives two answers.
template <typename Kernel, typename... Arguments>
void host_launch(Kernel kernel, unsigned int grid, unsigned int block, int falling, Arguments... arguments) {
    gridDim.x = grid;
    blockDim.x = block;
    for (unsigned int b = 0; b < grid; ++b) {
        for (unsigned int t = 0; t < block; ++t) {
            blockIdx.x = falling ? grid - 1 - b : b;
            threadIdx.x = falling ? block - 1 - t : t;
            kernel(arguments...);
        }
    }
}
