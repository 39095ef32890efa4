// Ragged records of an I/O buffer as one compact tensor: what ESPN calls
// restructuring, on the GPU that the records were read into.
//
// out[begin[i] .. begin[i + 1]) = buffer[offset[i] .. offset[i] + begin[i + 1] - begin[i])
//
// A warp makes kSpan bytes of the output, whatever records they are of, so that many small records
// and a few large ones are the same work. It finds the first by a search of 32 branches, and learns
// of 32 records at a time where they are. Addresses are 64 bits wide.
//
// Three variants, by what offsets, sizes and both pointers are multiples of: 16 bytes, 4 bytes, or
// 1, where words of the output are put together of two of the buffer. Not a byte outside the
// records is read.
#include <cstdint>

namespace {

constexpr int kWarp = 32;
constexpr unsigned kAll = 0xFFFFFFFFu;
// Loads of a lane that are under way at once: of 16 bytes, and of words.
constexpr int kPiecesAhead = 4, kWordsAhead = 8;

// The number of the record that holds byte `at` of the output: the last that begins there or
// before. `begin[0]` is 0, and records are `n`, at least one.
__device__ int64_t record_of(const int64_t* __restrict__ begin, int64_t n, int64_t at, int lane) {
  int64_t first = 0;
  while (n > 1) {
    const int64_t step = (n + kWarp - 1) / kWarp;
    const int64_t place = lane * step;
    const bool is_before = place < n && begin[first + place] <= at;
    // The lanes that hold a record before `at` are the first ones, lane 0 among them.
    const int64_t passed = (__popc(__ballot_sync(kAll, is_before)) - 1) * step;
    first += passed;
    n = n - passed < step ? n - passed : step;
  }
  return first;
}

// `n` units by the lanes of a warp, several of each at a time.
template <typename Unit>
__device__ void copy_units(Unit* __restrict__ out, const Unit* __restrict__ in, int64_t n,
                           int lane) {
  constexpr int kAhead = sizeof(Unit) == 16 ? kPiecesAhead : kWordsAhead;
  int64_t i = lane;
#pragma unroll 1
  for (; i + (kAhead - 1) * kWarp < n; i += kAhead * kWarp) {
    Unit ahead[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) ahead[k] = __ldg(in + i + k * kWarp);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) out[i + k * kWarp] = ahead[k];
  }
#pragma unroll 1
  for (; i < n; i += kWarp) out[i] = __ldg(in + i);
}

__device__ void copy_bytes(uint8_t* out, const uint8_t* in, int64_t n, int lane) {
  if (lane < n) out[lane] = __ldg(in + lane);
}

// Bytes from any address to any other. Whole words of the output come of two words of the buffer,
// both within the record: so at least four bytes at both ends are copied one by one.
__device__ void copy_shifted(uint8_t* __restrict__ out, const uint8_t* __restrict__ in, int64_t n,
                             int lane) {
  const int64_t to_word = (-reinterpret_cast<uintptr_t>(out)) & 3;
  const int64_t head = 4 + to_word < n ? 4 + to_word : n;
  const int64_t words = n - head >= 4 ? (n - head - 4) / 4 : 0;
  copy_bytes(out, in, head, lane);
  const int64_t done = head + 4 * words;
  copy_bytes(out + done, in + done, n - done, lane);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(in + head);
  const uint32_t* word = reinterpret_cast<const uint32_t*>(begin & ~uintptr_t{3});
  const unsigned bits = 8 * (begin & 3);
  uint32_t* target = reinterpret_cast<uint32_t*>(out + head);
  constexpr int kAhead = kWordsAhead;
  int64_t i = lane;
#pragma unroll 1
  for (; i + (kAhead - 1) * kWarp < words; i += kAhead * kWarp) {
    uint32_t low[kAhead], high[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      low[k] = __ldg(word + i + k * kWarp);
      high[k] = __ldg(word + i + k * kWarp + 1);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      target[i + k * kWarp] = __funnelshift_r(low[k], high[k], bits);
    }
  }
#pragma unroll 1
  for (; i < words; i += kWarp) {
    target[i] = __funnelshift_r(__ldg(word + i), __ldg(word + i + 1), bits);
  }
}

template <int kAlign>
__device__ void copy(uint8_t* out, const uint8_t* in, int64_t n, int lane) {
  if (kAlign == 16) {
    copy_units(reinterpret_cast<uint4*>(out), reinterpret_cast<const uint4*>(in), n / 16, lane);
  } else if (kAlign == 4) {
    copy_units(reinterpret_cast<uint32_t*>(out), reinterpret_cast<const uint32_t*>(in), n / 4,
               lane);
  } else {
    copy_shifted(out, in, n, lane);
  }
}

// Of another lane's 64 bits.
__device__ int64_t of_lane(int64_t value, int lane) {
  return static_cast<int64_t>(__shfl_sync(kAll, static_cast<unsigned long long>(value), lane));
}

template <int kAlign>
__device__ void gather(const uint8_t* __restrict__ buffer, const int64_t* __restrict__ offset,
                       const int64_t* __restrict__ begin, uint8_t* __restrict__ out, int64_t n,
                       int64_t span) {
  const int lane = threadIdx.x % kWarp;
  const int64_t warp =
      static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  const int64_t total = begin[n];
  int64_t at = warp * span;
  if (at >= total) return;
  const int64_t end = at + span < total ? at + span : total;
  for (int64_t i = record_of(begin, n, at, lane); at < end; i += kWarp) {
    // After the last record come no others: it ends the output.
    const int64_t mine = i + lane < n ? i + lane : n - 1;
    const int64_t my_end = begin[mine + 1];
    const int64_t my_first = offset[mine] - begin[mine];  // of the buffer, for the output's byte 0
    for (int k = 0; k < kWarp && at < end; ++k) {
      const int64_t record_end = of_lane(my_end, k);
      const int64_t last = record_end < end ? record_end : end;
      copy<kAlign>(out + at, buffer + (of_lane(my_first, k) + at), last - at, lane);
      at = last;
    }
  }
}

}  // namespace

#define ESPNX_GATHER(align)                                                                    \
  extern "C" __global__ void __launch_bounds__(256)                                            \
      espnx_gather_##align(const uint8_t* buffer, const int64_t* offset, const int64_t* begin, \
                           uint8_t* out, int64_t n, int64_t span) {                            \
    gather<align>(buffer, offset, begin, out, n, span);                                        \
  }

ESPNX_GATHER(16)
ESPNX_GATHER(4)
ESPNX_GATHER(1)
