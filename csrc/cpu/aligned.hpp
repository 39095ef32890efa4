// An array of floats that starts on a cache line. Loads of 64 bytes that straddle two lines halve
// the speed of a kernel.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>

namespace espnx {

class AlignedFloats {
 public:
  explicit AlignedFloats(size_t n)
      : values_(
            static_cast<float*>(::operator new(n * sizeof(float), std::align_val_t{kAlignment}))),
        n_(n) {}

  float* data() { return values_.get(); }
  const float* data() const { return values_.get(); }
  void fill(float value) { std::fill_n(values_.get(), n_, value); }

 private:
  static constexpr size_t kAlignment = 64;
  struct Free {
    void operator()(float* p) const { ::operator delete(p, std::align_val_t{kAlignment}); }
  };
  std::unique_ptr<float, Free> values_;
  size_t n_;
};

}  // namespace espnx
