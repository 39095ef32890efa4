// CRC32C of many ranges of a byte buffer, a warp for each, by tables that every lane has a copy of.
//
// A range is seen as its first bytes up to a multiple of 16 (`head`), whole pieces of 16 bytes, and
// its last bytes. Head and end go byte by byte. Of the pieces, lane i takes piece i of each round
// of 32, so that a warp reads 512 bytes side by side, with zeros before the first piece (they leave
// an empty register empty). Each of a piece's four words has a register of its own; between rounds
// it moves past 512 bytes, which is a product with a constant: four look-ups, one a byte. Look-ups
// are what takes the time: in one table 32 lanes would meet in 3 or 4 of shared memory's banks at a
// time, so the table lies there 32 times, a bank for each lane, 128 KiB in all.
//
// buffer                 uint8, anywhere; offset, size int64 [n], any alignment
// tables                 uint32 [10, 4, 256]: what byte k of a register, of that value, becomes
//                        when it moves past 512 bytes; past 4, 8, 12, 16; past 16, 32, 64, 128, 256
// crc                    int64 [n]
// initial                the register before the first byte, seed ^ 0xFFFFFFFF
#include <cstdint>

namespace {

constexpr int kWarp = 32;
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kPiece = 16;
constexpr int kTable = 4 * 256;
constexpr int kWords = 4;
// Of the table in shared memory: the bytes of an entry, 32 times, and of the 256 of one byte of a
// register. It begins at a multiple of the latter, so that parts of an address can be joined by OR.
constexpr unsigned kEntryBytes = 4 * kWarp, kByteTable = 256 * kEntryBytes;

extern __shared__ uint32_t shifts[];

// What byte kByte of a register becomes after one round. `row`: where this lane's table begins.
template <int kByte>
__device__ __forceinline__ uint32_t moved(uint32_t row, uint32_t state) {
  const uint32_t entry = kByte == 0 ? state << 7 : state >> (8 * kByte - 7);
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1+%2];"
               : "=r"(value)
               : "r"((entry & 255 * kEntryBytes) | row), "n"(kByte * kByteTable));
  return value;
}

// A register for each word of a piece, one round and a piece further on.
__device__ __forceinline__ void take(uint32_t row, const uint4& piece, uint4& state) {
  const auto past_round = [row](uint32_t each) {
    return moved<0>(row, each) ^ moved<1>(row, each) ^ moved<2>(row, each) ^ moved<3>(row, each);
  };
  state.x = past_round(state.x) ^ piece.x;
  state.y = past_round(state.y) ^ piece.y;
  state.z = past_round(state.z) ^ piece.z;
  state.w = past_round(state.w) ^ piece.w;
}

// The register after what a table in global memory stands for.
__device__ uint32_t past(const uint32_t* __restrict__ table, uint32_t state) {
  return __ldg(table + (state & 255)) ^ __ldg(table + 256 + (state >> 8 & 255)) ^
         __ldg(table + 512 + (state >> 16 & 255)) ^ __ldg(table + 768 + (state >> 24));
}

// The register after some bytes more.
__device__ uint32_t past_bytes(const uint32_t* __restrict__ past_word, const uint8_t* data,
                               int64_t n, uint32_t state) {
  // One byte's table is that of a word's last byte.
#pragma unroll 1
  for (int64_t i = 0; i < n; ++i) {
    state = state >> 8 ^ __ldg(past_word + 768 + ((state ^ __ldg(data + i)) & 255));
  }
  return state;
}

// The register that takes all pieces of a range from `state`, the same in every lane.
__device__ uint32_t past_pieces(const uint4* __restrict__ pieces, int64_t n, uint32_t state,
                                uint32_t row, const uint32_t* __restrict__ tables, int lane) {
  int64_t left = (n + kWarp - 1) / kWarp;  // rounds
  // This lane's piece of the first round: below 0 where that has none for it.
  const int64_t first = n - left * kWarp + lane;
  const uint4* next = pieces + first;
  uint4 even = make_uint4(0, 0, 0, 0), odd = even, states = even;
  if (first >= 0) even = __ldg(next);
  if (first == 0) even.x ^= state;
  if (left > 1) odd = __ldg(next + kWarp);
  // Two rounds are under way while one is taken.
#pragma unroll 1
  for (; left > 1; left -= 2) {
    take(row, even, states);
    if (left > 2) even = __ldg(next + 2 * kWarp);
    take(row, odd, states);
    if (left > 3) odd = __ldg(next + 3 * kWarp);
    next += 2 * kWarp;
  }
  if (left > 0) take(row, even, states);
  // A piece's words lie 16, 12, 8 and 4 bytes before its end, lanes a piece apart.
  state = past(tables + 4 * kTable, states.x) ^ past(tables + 3 * kTable, states.y) ^
          past(tables + 2 * kTable, states.z) ^ past(tables + kTable, states.w);
#pragma unroll
  for (int step = 0; step < 5; ++step) {
    const uint32_t other = __shfl_xor_sync(kAll, state, 1 << step);
    const bool is_later = lane >> step & 1;
    state = past(tables + (1 + kWords + step) * kTable, is_later ? other : state) ^
            (is_later ? state : other);
  }
  return state;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(1024, 1)
    espnx_crc32c(const uint8_t* __restrict__ buffer, const int64_t* __restrict__ offset,
                 const int64_t* __restrict__ size, const uint32_t* __restrict__ tables,
                 int64_t* __restrict__ crc, int64_t n, uint32_t initial) {
  const uint32_t begin = static_cast<uint32_t>(__cvta_generic_to_shared(shifts));
  const uint32_t table = (begin + kByteTable - 1) & ~(kByteTable - 1);
#pragma unroll 1
  for (int i = threadIdx.x; i < kTable * kWarp; i += blockDim.x) {
    shifts[(table - begin) / 4 + i] = __ldg(tables + i / kWarp);
  }
  __syncthreads();
  const int lane = threadIdx.x % kWarp;
  const int warps = blockDim.x / kWarp;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * warps;
#pragma unroll 1
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / kWarp; item < n;
       item += stride) {
    const uint8_t* data = buffer + offset[item];
    const int64_t bytes = size[item];
    const int64_t to_piece = (-reinterpret_cast<uintptr_t>(data)) & (kPiece - 1);
    const int64_t head = to_piece < bytes ? to_piece : bytes;
    const int64_t pieces = (bytes - head) / kPiece;
    uint32_t state = past_bytes(tables + kTable, data, head, initial);
    if (pieces > 0) {
      state = past_pieces(reinterpret_cast<const uint4*>(data + head), pieces, state,
                          table + 4 * lane, tables, lane);
    }
    const int64_t done = head + kPiece * pieces;
    state = past_bytes(tables + kTable, data + done, bytes - done, state);
    if (lane == 0) crc[item] = static_cast<int64_t>(state ^ 0xFFFFFFFFu);
  }
}
