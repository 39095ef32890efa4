// See product.hpp.
#include "product.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <utility>

#include "cpu/cpu_level.hpp"
#include "cpu/parallel.hpp"

namespace espnx {
namespace {

// Vectors of a tile, [width, 16]: each has a lane of a register, or of one of several registers.
constexpr int kLanes = 16;
constexpr int64_t kEncodeGrain = 256;
// A centroid without vectors takes over half of the largest cluster: both stand where that one
// stood, so much apart.
constexpr float kSplit = 1.0f / 1024;

// Values of as many lanes as a level's registers have. Written out: GCC takes no width of a
// template's argument.
struct Lanes4 {
  using Floats = float __attribute__((vector_size(16)));
  using Ints = int32_t __attribute__((vector_size(16)));
};
struct Lanes8 {
  using Floats = float __attribute__((vector_size(32)));
  using Ints = int32_t __attribute__((vector_size(32)));
};
struct Lanes16 {
  using Floats = float __attribute__((vector_size(64)));
  using Ints = int32_t __attribute__((vector_size(64)));
};

// nearest[lane] = the centroid (of 256, `stride` values apart) nearest to the vector in that lane.
// kWidth: the width where the compiler knows it, and keeps the tile in registers; else 0.
template <typename Lanes, int kWidth>
__attribute__((always_inline)) inline void find_nearest(const float* tile, int64_t any_width,
                                                        const float* centroids, int64_t stride,
                                                        int32_t* nearest) {
  using Floats = typename Lanes::Floats;
  using Ints = typename Lanes::Ints;
  constexpr int kStep = sizeof(Ints) / sizeof(int32_t);
  const int64_t width = kWidth > 0 ? kWidth : any_width;
  for (int begin = 0; begin < kLanes; begin += kStep) {
    Floats least = Floats{} + std::numeric_limits<float>::infinity();
    Ints at = {};
    for (int32_t c = 0; c < kCentroids; ++c) {
      const float* centroid = centroids + c * stride;
      Floats sum = {};
      for (int64_t k = 0; k < width; ++k) {
        Floats values;
        std::memcpy(&values, tile + k * kLanes + begin, sizeof(values));
        const Floats difference = values - centroid[k];
        sum += difference * difference;
      }
      const Ints is_nearer = sum < least;
      least = is_nearer ? sum : least;
      at = is_nearer ? Ints{} + c : at;
    }
    std::memcpy(nearest + begin, &at, sizeof(at));
  }
}

template <typename Lanes>
__attribute__((always_inline)) inline void find_nearest_any(const float* tile, int64_t width,
                                                            const float* centroids, int64_t stride,
                                                            int32_t* nearest) {
  switch (width) {
    case 1: return find_nearest<Lanes, 1>(tile, width, centroids, stride, nearest);
    case 2: return find_nearest<Lanes, 2>(tile, width, centroids, stride, nearest);
    case 3: return find_nearest<Lanes, 3>(tile, width, centroids, stride, nearest);
    case 4: return find_nearest<Lanes, 4>(tile, width, centroids, stride, nearest);
    case 6: return find_nearest<Lanes, 6>(tile, width, centroids, stride, nearest);
    case 8: return find_nearest<Lanes, 8>(tile, width, centroids, stride, nearest);
    default: return find_nearest<Lanes, 0>(tile, width, centroids, stride, nearest);
  }
}

using FindNearest = void (*)(const float* tile, int64_t width, const float* centroids,
                             int64_t stride, int32_t* nearest);

void find_nearest_portable(const float* tile, int64_t width, const float* centroids, int64_t stride,
                           int32_t* nearest) {
  find_nearest_any<Lanes4>(tile, width, centroids, stride, nearest);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void find_nearest_avx2(const float* tile, int64_t width,
                                                           const float* centroids, int64_t stride,
                                                           int32_t* nearest) {
  find_nearest_any<Lanes8>(tile, width, centroids, stride, nearest);
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma"))) void find_nearest_avx512(
    const float* tile, int64_t width, const float* centroids, int64_t stride, int32_t* nearest) {
  find_nearest_any<Lanes16>(tile, width, centroids, stride, nearest);
}
#endif

FindNearest find_nearest_in_force() {
#if defined(__x86_64__)
  if (cpu_level() >= CpuLevel::kAvx512) return find_nearest_avx512;
  if (cpu_level() == CpuLevel::kAvx2) return find_nearest_avx2;
#endif
  return find_nearest_portable;
}

// Lanes [width, 16] of 16 vectors from `first` on; behind the last one it is repeated.
void fill_tile(const float* vectors, int64_t n, int64_t dim, int64_t first, int64_t width,
               float* tile) {
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const float* row = vectors + std::min(first + lane, n - 1) * dim;
    for (int64_t k = 0; k < width; ++k) tile[k * kLanes + lane] = row[k];
  }
}

// k-means of one part, whose vectors are kept in tiles.
class PartMeans {
 public:
  PartMeans(const float* vectors, int64_t n, int64_t dim, int64_t width, float* centroids)
      : n_(n),
        width_(width),
        stride_(dim),
        centroids_(centroids),
        nearest_((n + kLanes - 1) / kLanes * kLanes, -1),
        tiles_(nearest_.size() * width),
        sums_(kCentroids * width),
        counts_(kCentroids) {
    for (int64_t first = 0; first < n; first += kLanes) {
      fill_tile(vectors, n, dim, first, width, tiles_.data() + first * width);
    }
  }

  void fit(int rounds, uint64_t seed) {
    std::vector<int64_t> order(n_);
    std::iota(order.begin(), order.end(), int64_t{0});
    std::mt19937_64 random(seed);
    for (int64_t c = 0; c < kCentroids && c < n_; ++c)
      std::swap(order[c], order[c + random() % (n_ - c)]);
    for (int64_t c = 0; c < kCentroids; ++c) {
      for (int64_t k = 0; k < width_; ++k) centroid(c)[k] = value(order[c % n_], k);
    }
    for (int round = 0; round < rounds && assign(); ++round) move();
  }

 private:
  float value(int64_t i, int64_t k) const {
    return tiles_[i / kLanes * kLanes * width_ + k * kLanes + i % kLanes];
  }
  float* centroid(int64_t c) { return centroids_ + c * stride_; }

  // Whether any vector has another centroid than before.
  bool assign() {
    const FindNearest find = find_nearest_in_force();
    int32_t found[kLanes];
    bool changed = false;
    for (int64_t first = 0; first < n_; first += kLanes) {
      find(tiles_.data() + first * width_, width_, centroids_, stride_, found);
      int32_t* before = nearest_.data() + first;
      changed |= std::memcmp(before, found, sizeof(found)) != 0;
      std::memcpy(before, found, sizeof(found));
    }
    return changed;
  }

  void move() {
    std::fill(sums_.begin(), sums_.end(), 0.0);
    std::fill(counts_.begin(), counts_.end(), 0);
    for (int64_t i = 0; i < n_; ++i) {
      const int32_t c = nearest_[i];
      ++counts_[c];
      for (int64_t k = 0; k < width_; ++k) sums_[c * width_ + k] += value(i, k);
    }
    for (int64_t c = 0; c < kCentroids; ++c) {
      for (int64_t k = 0; counts_[c] > 0 && k < width_; ++k) {
        centroid(c)[k] =
            static_cast<float>(sums_[c * width_ + k] / static_cast<double>(counts_[c]));
      }
    }
    for (int64_t c = 0; c < kCentroids; ++c) {
      if (counts_[c] == 0) split_largest_into(c);
    }
  }

  void split_largest_into(int64_t empty) {
    const int64_t largest = std::max_element(counts_.begin(), counts_.end()) - counts_.begin();
    if (counts_[largest] < 2) return;
    for (int64_t k = 0; k < width_; ++k) {
      const float apart = k % 2 == 0 ? kSplit : -kSplit, at = centroid(largest)[k];
      centroid(empty)[k] = at * (1 + apart);
      centroid(largest)[k] = at * (1 - apart);
    }
    counts_[empty] = counts_[largest] / 2;
    counts_[largest] -= counts_[empty];
  }

  int64_t n_, width_, stride_;
  float* centroids_;
  std::vector<int32_t> nearest_;
  std::vector<float> tiles_;
  std::vector<double> sums_;
  std::vector<int64_t> counts_;
};

}  // namespace

void fit_product(const ProductParts& parts, const float* vectors, int64_t n, int rounds,
                 uint64_t seed, int threads, float* centroids) {
  parallel_for(parts.count(), 1, threads, [&](int, int64_t part, int64_t end) {
    for (; part < end; ++part) {
      const int64_t begin = parts.begin[part], width = parts.begin[part + 1] - begin;
      PartMeans(vectors + begin, n, parts.dim, width, centroids + begin).fit(rounds, seed + part);
    }
  });
}

void encode_product(const ProductParts& parts, const float* centroids, const float* vectors,
                    int64_t n, int threads, uint8_t* out) {
  const FindNearest find = find_nearest_in_force();
  int64_t widest = 0;
  for (int64_t part = 0; part < parts.count(); ++part) {
    widest = std::max(widest, parts.begin[part + 1] - parts.begin[part]);
  }
  std::vector<std::vector<float>> tiles(std::max(1, threads), std::vector<float>(widest * kLanes));
  parallel_for(n, kEncodeGrain, threads, [&](int thread, int64_t first, int64_t end) {
    int32_t found[kLanes];
    for (; first < end; first += kLanes) {
      const int64_t lanes = std::min<int64_t>(kLanes, end - first);
      for (int64_t part = 0; part < parts.count(); ++part) {
        const int64_t begin = parts.begin[part], width = parts.begin[part + 1] - begin;
        fill_tile(vectors + begin, n, parts.dim, first, width, tiles[thread].data());
        find(tiles[thread].data(), width, centroids + begin, parts.dim, found);
        for (int64_t lane = 0; lane < lanes; ++lane) {
          out[(first + lane) * parts.count() + part] = static_cast<uint8_t>(found[lane]);
        }
      }
    }
  });
}

}  // namespace espnx
