// kernels.cu as a shared library for the CPU: each kernel behind a launcher of the same name with `host_` in front.
#include "kernels_host.h"
#include "kernels.cu"

typedef unsigned char byte;
typedef const long long* list;

extern "C" void host_move_blocks(unsigned grid, unsigned block, int falling, byte* arena, list into, list from,
                                 u64 count, u64 block_bytes) {
    host_launch(move_blocks, grid, block, falling, arena, into, from, count, block_bytes);
}

extern "C" void host_copy_blocks(unsigned grid, unsigned block, int falling, byte* target, const byte* source,
                                 list into, list from, u64 count, u64 block_bytes) {
    host_launch(copy_blocks, grid, block, falling, target, source, into, from, count, block_bytes);
}

extern "C" void host_gather_blocks(unsigned grid, unsigned block, int falling, byte* staging, const byte* arena,
                                   list from, u64 count, u64 block_bytes) {
    host_launch(gather_blocks, grid, block, falling, staging, arena, from, count, block_bytes);
}

extern "C" void host_scatter_blocks(unsigned grid, unsigned block, int falling, byte* arena, const byte* staging,
                                    list into, u64 count, u64 block_bytes) {
    host_launch(scatter_blocks, grid, block, falling, arena, staging, into, count, block_bytes);
}

extern "C" void host_checksum_blocks(unsigned grid, unsigned block, int falling, u64* sums, const byte* arena,
                                     list blocks, u64 count, u64 block_bytes) {
    host_launch(checksum_blocks, grid, block, falling, sums, arena, blocks, count, block_bytes);
}

extern "C" void host_read_blocks(unsigned grid, unsigned block, int falling, u64* sums, const byte* arena, list blocks,
                                 u64 count, u64 block_bytes) {
    host_launch(read_blocks, grid, block, falling, sums, arena, blocks, count, block_bytes);
}
