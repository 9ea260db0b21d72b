// Kernels of the memory plane: block moves, gather and scatter, checksums, and a stand-in for a decode step.
//
// Compiled by NVRTC at run time, by nvcc in CI, and by g++ through kernels_host.h, which runs the same code thread
// by thread on the CPU so that indexing is tested without a GPU. So: no includes, no barriers, no warp intrinsics;
// each thread finds its work from its indices alone.
//
// A plan is one launch. Its unit of work is a tile, a part of one piece, so that few thread blocks share many
// small pieces and few large ones alike. The launch has few thread blocks: decode needs the others.

#define TILE_BYTES 16384
typedef unsigned long long u64;

struct alignas(16) Word16 {
    unsigned int part[4];
};

// Copies bytes [from, to) of a piece with words of T; threads of a block take neighbouring words. Four loads are
// under way per thread before the first store: with few thread blocks, latency is what limits the rate.
template <typename T>
__device__ __forceinline__ void copy_words(unsigned char* target, const unsigned char* source, u64 from, u64 to) {
    T* into = reinterpret_cast<T*>(target);
    const T* of = reinterpret_cast<const T*>(source);
    const u64 end = to / sizeof(T);
    const u64 step = blockDim.x;
    u64 i = from / sizeof(T) + threadIdx.x;
    for (; i + 3 * step < end; i += 4 * step) {
        const T a = of[i];
        const T b = of[i + step];
        const T c = of[i + 2 * step];
        const T d = of[i + 3 * step];
        into[i] = a;
        into[i + step] = b;
        into[i + 2 * step] = c;
        into[i + 3 * step] = d;
    }
    for (; i < end; i += step) into[i] = of[i];
}

// Piece k goes from source + from[k] * piece_bytes to target + into[k] * piece_bytes; a null list means k itself.
__device__ __forceinline__ void copy_pieces(unsigned char* target, const unsigned char* source, const long long* into,
                                            const long long* from, u64 count, u64 piece_bytes) {
    const u64 tiles = (piece_bytes + TILE_BYTES - 1) / TILE_BYTES;
    // Both sides of every piece are aligned to the word when the bases and the piece's size are.
    const u64 alignment = reinterpret_cast<u64>(target) | reinterpret_cast<u64>(source) | piece_bytes;
    for (u64 work = blockIdx.x; work < count * tiles; work += gridDim.x) {
        const u64 k = work / tiles;
        const u64 start = (work % tiles) * TILE_BYTES;
        const u64 end = start + TILE_BYTES < piece_bytes ? start + TILE_BYTES : piece_bytes;
        unsigned char* to = target + (into ? static_cast<u64>(into[k]) : k) * piece_bytes;
        const unsigned char* of = source + (from ? static_cast<u64>(from[k]) : k) * piece_bytes;
        if (alignment % 16 == 0) {
            copy_words<Word16>(to, of, start, end);
        } else if (alignment % 4 == 0) {
            copy_words<unsigned int>(to, of, start, end);
        } else {
            copy_words<unsigned char>(to, of, start, end);
        }
    }
}

// Relocation inside one arena. Sources and destinations are disjoint, so the order does not matter.
extern "C" __global__ void move_blocks(unsigned char* arena, const long long* into, const long long* from, u64 count,
                                       u64 block_bytes) {
    copy_pieces(arena, arena, into, from, count, block_bytes);
}

// Between two arenas; either may be pinned host memory, which the SMs then read or write over the link.
extern "C" __global__ void copy_blocks(unsigned char* target, const unsigned char* source, const long long* into,
                                       const long long* from, u64 count, u64 block_bytes) {
    copy_pieces(target, source, into, from, count, block_bytes);
}

// Scattered blocks into a contiguous staging buffer, which one large copy then takes over the link.
extern "C" __global__ void gather_blocks(unsigned char* staging, const unsigned char* arena, const long long* from,
                                         u64 count, u64 block_bytes) {
    copy_pieces(staging, arena, nullptr, from, count, block_bytes);
}

extern "C" __global__ void scatter_blocks(unsigned char* arena, const unsigned char* staging, const long long* into,
                                          u64 count, u64 block_bytes) {
    copy_pieces(arena, staging, into, nullptr, count, block_bytes);
}

// Adds each block's checksum to sums[k], which starts at zero. The formula is that of copying.checksums: a sum over
// 8-byte words, so the threads may add their shares in any order.
extern "C" __global__ void checksum_blocks(u64* sums, const unsigned char* arena, const long long* blocks, u64 count,
                                           u64 block_bytes) {
    const u64 place = 0x9E3779B97F4A7C15ull;
    const u64 mix = 0xFF51AFD7ED558CCDull;
    const u64 words = (block_bytes + 7) / 8;
    const bool aligned = (reinterpret_cast<u64>(arena) | block_bytes) % 8 == 0;
    for (u64 k = blockIdx.x; k < count; k += gridDim.x) {
        const unsigned char* block = arena + static_cast<u64>(blocks[k]) * block_bytes;
        u64 sum = 0;
        for (u64 i = threadIdx.x; i < words; i += blockDim.x) {
            u64 word = 0;
            if (aligned) {
                word = reinterpret_cast<const u64*>(block)[i];
            } else {
                for (u64 j = 0; j < 8 && i * 8 + j < block_bytes; ++j) {
                    word |= static_cast<u64>(block[i * 8 + j]) << (8 * j);
                }
            }
            const u64 mixed = (word ^ ((i + 1) * place)) * mix;
            sum += (mixed ^ (mixed >> 32)) * mix;
        }
        atomicAdd(&sums[k], sum);
    }
}

// A stand-in for the memory traffic of a decode step: reads whole blocks and keeps almost nothing of them.
extern "C" __global__ void read_blocks(u64* sums, const unsigned char* arena, const long long* blocks, u64 count,
                                       u64 block_bytes) {
    u64 sum = 0;
    for (u64 k = blockIdx.x; k < count; k += gridDim.x) {
        const u64* block = reinterpret_cast<const u64*>(arena + static_cast<u64>(blocks[k]) * block_bytes);
        for (u64 i = threadIdx.x; i < block_bytes / 8; i += blockDim.x) sum += block[i];
    }
    atomicAdd(sums, sum);
}
