// See robust_prune.hpp.
#include "robust_prune.hpp"

#include <algorithm>
#include <exception>
#include <limits>
#include <memory>

#include "cpu/parallel.hpp"

namespace espnx::graph {
namespace {

constexpr float kAlphaStep = 1.2f;
constexpr float kChosen = std::numeric_limits<float>::infinity();
constexpr int64_t kPruneGrain = 16;  // nodes that a thread takes at a time

// What a thread of prune_all has.
struct Pruner {
  Pruner(int64_t dim, VectorFormat format) : target(dim, format, Metric::kL2), prune(dim, format) {}

  DistanceQuery target;
  RobustPrune prune;
  std::vector<Near> pool;
  std::vector<const uint8_t*> rows;
  std::vector<float> distance;
};

}  // namespace

const std::vector<Near>& RobustPrune::choose(std::vector<Near>& pool, const VectorTable& vectors,
                                             const PruneRule& rule) {
  std::sort(pool.begin(), pool.end());
  pool.erase(std::unique(pool.begin(), pool.end(),
                         [](const Near& a, const Near& b) { return a.node == b.node; }),
             pool.end());
  if (static_cast<int64_t>(pool.size()) > kPrunedCandidates) pool.resize(kPrunedCandidates);
  const auto degree = static_cast<size_t>(rule.degree);
  chosen_.clear();
  occlusion_.assign(pool.size(), 0);
  rows_.resize(pool.size());
  for (size_t i = 0; i < pool.size(); ++i) rows_[i] = vectors.row(pool[i].node);
  block_.assign(rows_.data(), static_cast<int64_t>(pool.size()));
  for (float now = 1;; now = std::min(now * kAlphaStep, rule.alpha)) {
    for (size_t i = 0; i < pool.size() && chosen_.size() < degree; ++i) {
      if (occlusion_[i] > now) continue;
      occlusion_[i] = kChosen;
      chosen_.push_back(pool[i]);
      if (chosen_.size() == degree) break;
      left_.clear();  // behind the chosen one, whose occlusion it may raise
      for (size_t j = i + 1; j < pool.size(); ++j) {
        if (occlusion_[j] <= rule.alpha) left_.push_back(static_cast<uint32_t>(j));
      }
      distance_.resize(left_.size());
      block_.measure(i, left_.data(), static_cast<int64_t>(left_.size()), distance_.data());
      for (size_t j = 0; j < left_.size(); ++j) {
        float& occlusion = occlusion_[left_[j]];
        const float between = distance_[j], far = pool[left_[j]].distance;
        // A copy of the chosen one is reached by way of it.
        occlusion =
            std::max(occlusion, between > 0 ? far / between : std::numeric_limits<float>::max());
      }
    }
    if (now >= rule.alpha || chosen_.size() == degree) break;
  }
  if (!rule.saturate) return chosen_;
  for (size_t i = 0; i < pool.size() && chosen_.size() < degree; ++i) {
    if (occlusion_[i] != kChosen) chosen_.push_back(pool[i]);
  }
  return chosen_;
}

void prune_all(const VectorTable& targets, const int64_t* candidates, int64_t width,
               const VectorTable& vectors, const PruneRule& rule, int threads,
               int64_t* neighbours) {
  std::vector<std::unique_ptr<Pruner>> pruners(std::max(1, threads));
  std::vector<std::exception_ptr> failures(pruners.size());
  const auto prune = [&](int thread, int64_t begin, int64_t end) {
    auto& own = pruners[thread];
    if (!own) own = std::make_unique<Pruner>(vectors.dim, vectors.format);
    for (int64_t i = begin; i < end; ++i) {
      own->pool.clear(), own->rows.clear();
      for (int64_t j = 0; j < width; ++j) {
        const int64_t row = candidates[i * width + j];
        if (row < 0) continue;
        own->pool.push_back({0, static_cast<uint32_t>(row)});
        own->rows.push_back(vectors.row(row));
      }
      own->target.assign(targets.row(i));
      own->distance.resize(own->rows.size());
      own->target.measure(own->rows.data(), static_cast<int64_t>(own->rows.size()),
                          own->distance.data());
      for (size_t j = 0; j < own->pool.size(); ++j) own->pool[j].distance = own->distance[j];
      const std::vector<Near>& chosen = own->prune.choose(own->pool, vectors, rule);
      int64_t* out = neighbours + i * rule.degree;
      std::fill_n(out, rule.degree, int64_t{-1});
      for (size_t j = 0; j < chosen.size(); ++j) out[j] = chosen[j].node;
    }
  };
  parallel_for(targets.n, kPruneGrain, threads, [&](int thread, int64_t begin, int64_t end) {
    try {
      prune(thread, begin, end);
    } catch (...) {  // no memory
      failures[thread] = std::current_exception();
    }
  });
  for (const std::exception_ptr& each : failures) {
    if (each) std::rethrow_exception(each);
  }
}

}  // namespace espnx::graph
