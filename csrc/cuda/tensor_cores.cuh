// What kernels of csrc/cuda share: copies into shared memory that are waited for later, operands of
// tensor cores, products, and how a warp's values of rows lie in its ring.
#pragma once

#include <cstdint>

namespace {

__device__ __forceinline__ void copy_ahead(uint32_t to, const void* from, int n_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n_bytes)
               : "memory");
}

template <bool kBf16>
__device__ __forceinline__ void multiply(float* sum, const uint32_t* a, uint2 b) {
  if constexpr (kBf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
  }
}

// 16 rows of 32 int8 by 8 columns of as many: whole numbers, exact.
__device__ __forceinline__ void multiply(int* sum, const uint32_t* a, uint2 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

// The same of 16 int8.
__device__ __forceinline__ void multiply_half(int* sum, const uint32_t* a, uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

__device__ __forceinline__ void load_matrices(uint32_t* a, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ float fp32_of(uint32_t half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(half)));
  return value;
}

// Where kSlice values of 16 bits of each row lie, which one warp has of it.
template <int kSlice>
struct SliceLayout {
  static constexpr int kPitch = kSlice * 2;
  static_assert(kSlice == 64 || kSlice == 96 || kSlice == 128);

  // 16 bytes of a row: permuted, so that those of eight rows are in different banks.
  __device__ __forceinline__ static int place_of(int row, int piece) {
    return row * kPitch + (piece ^ (kSlice == 96 ? row >> 1 & 3 : row & 7)) * 16;
  }
  // From the place of a row's first 32 bytes, or of their second half, so many times 32 further;
  // places in rings are multiples of 128.
  __device__ __forceinline__ static uint32_t further(uint32_t place, int by) {
    constexpr int kPermuted = kSlice == 96 ? 2 : 4;  // so many times 32 bytes
    return (place ^ by % kPermuted * 32) + by / kPermuted * kPermuted * 32;
  }
};

}  // namespace
