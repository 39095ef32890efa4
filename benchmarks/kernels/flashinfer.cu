// FlashInfer's decode attention of one sequence (its headers, its choice of grids), called from C:
// what its Python's single_decode_with_kv_cache compiles and calls, without the packages that this
// needs. K and V are [heads, rows, d] ("HND").

#include <cstdint>
#include <flashinfer/attention/decode.cuh>
#include <flashinfer/attention/default_decode_params.cuh>
#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/mask.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/variants.cuh>

namespace {

using Plain = flashinfer::DefaultAttention<false, false, false, false>;

struct Arguments {
  void *q, *k, *v, *o, *tmp;
  std::uint32_t rows, query_heads, heads;
  float scale;
  cudaStream_t stream;
};

template <typename T, std::uint32_t D>
cudaError_t decode(const Arguments& a) {
  flashinfer::SingleDecodeParams<T, T, T> params(
      static_cast<T*>(a.q), static_cast<T*>(a.k), static_cast<T*>(a.v), static_cast<T*>(a.o),
      nullptr, a.rows, a.query_heads, a.heads, flashinfer::QKVLayout::kHND, D, -1, 0.0f, a.scale,
      1.0f, 10000.0f);
  return flashinfer::SingleDecodeWithKVCacheDispatched<D, flashinfer::PosEncodingMode::kNone,
                                                       Plain>(params, static_cast<T*>(a.tmp),
                                                              a.stream);
}

template <typename T, std::uint32_t D>
cudaError_t decode_on_tensor_cores(const Arguments& a) {
  flashinfer::SinglePrefillParams<T, T, T> params(
      static_cast<T*>(a.q), static_cast<T*>(a.k), static_cast<T*>(a.v), nullptr,
      static_cast<T*>(a.o), nullptr, nullptr, a.query_heads, a.heads, 1, a.rows, a.query_heads * D,
      D, D, a.rows * D, D, -1, 0.0f, a.scale, 1.0f, 10000.0f);
  return flashinfer::SinglePrefillWithKVCacheDispatched<D, D, flashinfer::PosEncodingMode::kNone,
                                                        false, flashinfer::MaskMode::kNone, Plain>(
      params, static_cast<T*>(a.tmp), a.stream);
}

template <typename T>
cudaError_t dispatch(const Arguments& a, std::uint32_t d, bool tensor_cores) {
  if (d == 64) return tensor_cores ? decode_on_tensor_cores<T, 64>(a) : decode<T, 64>(a);
  if (d == 128) return tensor_cores ? decode_on_tensor_cores<T, 128>(a) : decode<T, 128>(a);
  return cudaErrorInvalidValue;
}

}  // namespace

// Returns a cudaError_t, or -1 for what FlashInfer refuses.
extern "C" int espnx_flashinfer_decode(void* q, void* k, void* v, void* o, void* tmp,
                                       std::uint32_t rows, std::uint32_t query_heads,
                                       std::uint32_t heads, std::uint32_t d, float scale,
                                       int is_bf16, int tensor_cores, void* stream) {
  const Arguments a{q,    k,           v,     o,     tmp,
                    rows, query_heads, heads, scale, static_cast<cudaStream_t>(stream)};
  try {
    return is_bf16 ? dispatch<__nv_bfloat16>(a, d, tensor_cores != 0)
                   : dispatch<__half>(a, d, tensor_cores != 0);
  } catch (...) {
    return -1;
  }
}
