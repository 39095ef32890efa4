// See added.hpp.
#include "added.hpp"

#include <algorithm>
#include <limits>

#include "cpu/parallel.hpp"

namespace espnx::graph {
namespace {

constexpr int64_t kInsertedAtOnce = 64;  // while searches wait
constexpr int64_t kScannedAtOnce = 256;
constexpr int64_t kGrain = 8;  // queries that a thread takes at a time

}  // namespace

class AddedGraph::Best {
 public:
  explicit Best(int64_t k) : k_(static_cast<size_t>(k)) { kept_.reserve(k_ + 1); }

  void clear() { kept_.clear(); }
  size_t size() const { return kept_.size(); }
  float limit() const {
    return kept_.size() < k_ ? std::numeric_limits<float>::infinity() : kept_.back().distance;
  }

  void offer(float distance, int64_t id) {
    const Each each{distance, id};
    if (kept_.size() == k_ && !(each < kept_.back())) return;
    kept_.insert(std::upper_bound(kept_.begin(), kept_.end(), each), each);
    if (kept_.size() > k_) kept_.pop_back();
  }

  void write(float* distances, int64_t* ids) const {
    for (size_t i = 0; i < k_; ++i) {
      const bool is_there = i < kept_.size();
      distances[i] = is_there ? kept_[i].distance : std::numeric_limits<float>::infinity();
      ids[i] = is_there ? kept_[i].id : -1;
    }
  }

 private:
  struct Each {
    float distance;
    int64_t id;
    bool operator<(const Each& other) const {
      return distance != other.distance ? distance < other.distance : id < other.id;
    }
  };
  size_t k_;
  std::vector<Each> kept_;
};

AddedGraph::AddedGraph(int64_t dim, VectorFormat format, Metric metric, VamanaOptions options)
    : dim_(dim),
      format_(format),
      metric_(metric),
      table_{nullptr, 0, dim, format},
      graph_(table_, options) {}

void AddedGraph::hold(const uint8_t* rows, int64_t n, std::shared_ptr<void> owner) {
  std::unique_lock lock(mutex_);
  if (n < table_.n) return;  // another thread came with more
  table_.data = rows, table_.n = n;
  owner_.swap(owner);
  graph_.hold(table_);
}

void AddedGraph::insert_to(int64_t end) {
  for (bool is_left = metric_ == Metric::kL2; is_left;) {
    std::unique_lock lock(mutex_);
    const int64_t last = std::min(end, table_.n);
    graph_.insert_to(std::min(last, graph_.inserted() + kInsertedAtOnce));
    is_left = graph_.inserted() < last;
  }
}

int64_t AddedGraph::held() const {
  std::shared_lock lock(mutex_);
  return table_.n;
}

int64_t AddedGraph::inserted() const {
  std::shared_lock lock(mutex_);
  return graph_.inserted();
}

int64_t AddedGraph::size_bytes() const {
  std::shared_lock lock(mutex_);
  return graph_.size_bytes();
}

void AddedGraph::scan(const AddedRequest& request, const DistanceQuery& query, int64_t begin,
                      int64_t end, int64_t& measured, Best& best) const {
  const uint8_t* rows[kScannedAtOnce];
  int64_t places[kScannedAtOnce];
  float distances[kScannedAtOnce];
  while (begin < end) {
    int64_t count = 0;
    for (; begin < end && count < kScannedAtOnce; ++begin) {
      if (request.may[begin]) places[count] = begin, rows[count++] = table_.row(begin);
    }
    query.measure(rows, count, distances);
    measured += count;
    for (int64_t i = 0; i < count; ++i) {
      if (distances[i] <= best.limit()) best.offer(distances[i], request.ids[places[i]]);
    }
  }
}

void AddedGraph::search_one(const AddedRequest& request, int64_t number, int64_t indexed,
                            int64_t n_may, Vamana::ScratchPtr& scratch, Best& best) {
  const DistanceQuery query(request.queries + number * request.query_bytes, dim_, format_, metric_);
  best.clear();
  for (int64_t i = 0; i < request.n_known; ++i) {
    const int64_t id = request.known_ids[number * request.n_known + i];
    if (id >= 0) best.offer(request.known_distances[number * request.n_known + i], id);
  }
  int64_t measured = 0;
  bool is_found = false;
  if (indexed > 0) {
    if (!scratch) scratch = graph_.make_scratch();
    // The nearest of all nodes: those of them that may be found are the nearest of such, if they
    // are enough; wherever the others lie.
    const auto& near = graph_.nearest(query, request.list_size, *scratch, measured);
    int64_t count = 0;
    for (const Near& each : near) {
      count += each.node < indexed && request.may[each.node];
    }
    is_found = count >= std::min(request.k, n_may);
    for (size_t i = 0; is_found && i < near.size(); ++i) {
      if (near[i].node < indexed && request.may[near[i].node])
        best.offer(near[i].distance, request.ids[near[i].node]);
    }
  }
  scan(request, query, is_found ? indexed : 0, request.n, measured, best);
  best.write(request.distances + number * request.k, request.found + number * request.k);
  request.measured[number] = measured;
}

void AddedGraph::search(const AddedRequest& request) {
  std::shared_lock lock(mutex_);
  int64_t indexed = request.list_size > 0 ? std::min(graph_.inserted(), request.n) : 0;
  int64_t n_may = 0;
  for (int64_t i = 0; i < indexed; ++i) n_may += request.may[i] != 0;
  if (n_may == 0) indexed = 0;
  const int threads = std::max(1, request.threads);
  std::vector<Vamana::ScratchPtr> scratch;
  for (int i = 0; i < threads; ++i) scratch.emplace_back(nullptr, [](Vamana::Scratch*) {});
  parallel_for(request.n_queries, kGrain, threads, [&](int thread, int64_t begin, int64_t end) {
    Best best(request.k);
    for (int64_t i = begin; i < end; ++i)
      search_one(request, i, indexed, n_may, scratch[thread], best);
  });
}

}  // namespace espnx::graph
