// Whole numbers in vectors of 512 bits, for avx512.cpp and vnni.cpp, which differ in ESPNX_DOT
// alone: the sum of products of 16-bit numbers, two a lane. Included inside an unnamed namespace,
// after ESPNX_LEVEL. There is no include guard on purpose: each of those files compiles its own
// copy.

template <bool kIsSigned>
struct Whole {
  using Value = __m512i;
  using Sum = __m512i;
  static constexpr int64_t kStep = 32, kValueBytes = 1;

  ESPNX_LEVEL static inline Value widen(__m256i bytes) {
    return kIsSigned ? _mm512_cvtepi8_epi16(bytes) : _mm512_cvtepu8_epi16(bytes);
  }
  ESPNX_LEVEL static inline Value query(const void* q, int64_t k) {
    return _mm512_loadu_si512(static_cast<const int16_t*>(q) + k);
  }
  ESPNX_LEVEL static inline Value load(const uint8_t* row, int64_t k) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k)));
  }
  ESPNX_LEVEL static inline Value some(const uint8_t* row, int64_t k, int64_t n) {
    return widen(_mm256_maskz_loadu_epi8((1u << n) - 1, row + k));
  }
  ESPNX_LEVEL static inline Value sub(Value a, Value b) { return _mm512_sub_epi16(a, b); }
  ESPNX_LEVEL static inline Sum dot(Sum sum, Value a, Value b) { return ESPNX_DOT(sum, a, b); }
  ESPNX_LEVEL static inline Sum zero() { return _mm512_setzero_si512(); }
  ESPNX_LEVEL static inline int32_t total(Sum sum) { return _mm512_reduce_add_epi32(sum); }
};
