// See vamana.hpp.
#include "vamana.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

#include "cpu/parallel.hpp"

namespace espnx::graph {
namespace {

constexpr double kSlack = 1.3;  // DiskANN's
constexpr auto kProgressEvery = std::chrono::milliseconds(100);
constexpr int64_t kBuildGrain = 64;  // nodes that a thread takes at a time

}  // namespace

struct Vamana::Scratch {
  explicit Scratch(const VectorTable& vectors)
      : seen(vectors.n),
        target(vectors.dim, vectors.format, Metric::kL2),
        pruning(vectors.dim, vectors.format) {}

  // Forgets what was seen, in no time but once in 2^32 walks.
  void next_walk() {
    if (++turn == 0) std::fill(seen.begin(), seen.end(), 0), turn = 1;
  }
  bool see(uint32_t node) {
    const bool is_new = seen[node] != turn;
    seen[node] = turn;
    return is_new;
  }

  std::vector<uint32_t> seen;
  uint32_t turn = 0;
  int64_t measured = 0;
  std::vector<Near> list, passed, pool, linked;
  std::vector<char> expanded;  // beside `list`
  std::vector<uint32_t> around, fresh;
  std::vector<float> distance;
  std::vector<const uint8_t*> rows;
  DistanceQuery target;
  RobustPrune pruning;
};

Vamana::Vamana(VectorTable vectors, VamanaOptions options)
    : vectors_(vectors),
      options_(options),
      capacity_(
          std::max<int64_t>(options.degree + 1, static_cast<int64_t>(kSlack * options.degree))),
      edges_(vectors.n * capacity_),
      degree_(vectors.n),
      locks_(new std::atomic_flag[vectors.n]) {
  for (int64_t i = 0; i < vectors.n; ++i) locks_[i].clear();
}

uint32_t Vamana::find_medoid() const {
  const int64_t dim = vectors_.dim;
  std::vector<double> mean(dim);
  std::vector<float> values(dim);
  for (int64_t i = 0; i < vectors_.n; ++i) {
    widen(vectors_.row(i), dim, vectors_.format, values.data());
    for (int64_t k = 0; k < dim; ++k) mean[k] += values[k];
  }
  for (double& value : mean) value /= static_cast<double>(vectors_.n);
  uint32_t nearest = 0;
  double least = std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < vectors_.n; ++i) {
    widen(vectors_.row(i), dim, vectors_.format, values.data());
    double distance = 0;
    for (int64_t k = 0; k < dim; ++k) distance += (values[k] - mean[k]) * (values[k] - mean[k]);
    if (distance < least) least = distance, nearest = static_cast<uint32_t>(i);
  }
  return nearest;
}

void Vamana::measure(const std::vector<uint32_t>& nodes, Scratch& scratch) const {
  scratch.measured += static_cast<int64_t>(nodes.size());
  scratch.rows.resize(nodes.size());
  for (size_t i = 0; i < nodes.size(); ++i) scratch.rows[i] = vectors_.row(nodes[i]);
  scratch.distance.resize(nodes.size());
  scratch.target.measure(scratch.rows.data(), static_cast<int64_t>(nodes.size()),
                         scratch.distance.data());
}

void Vamana::add_to_pool(const std::vector<uint32_t>& nodes, Scratch& scratch) const {
  measure(nodes, scratch);
  for (size_t i = 0; i < nodes.size(); ++i) scratch.pool.push_back({scratch.distance[i], nodes[i]});
}

void Vamana::copy_neighbours(uint32_t node, std::vector<uint32_t>& out) {
  lock(node);
  out.assign(neighbours_of(node), neighbours_of(node) + degree_[node]);
  unlock(node);
}

void Vamana::walk(uint32_t begin, int64_t most, Scratch& scratch) {
  scratch.next_walk();
  scratch.passed.clear();
  scratch.list.clear();
  scratch.expanded.clear();
  const auto list_size = static_cast<size_t>(most);
  size_t first = 0;  // nothing before it waits for its expansion
  const auto add = [&](const std::vector<uint32_t>& nodes) {
    measure(nodes, scratch);
    for (size_t i = 0; i < nodes.size(); ++i) {
      const Near near{scratch.distance[i], nodes[i]};
      if (scratch.list.size() == list_size && !(near < scratch.list.back())) continue;
      const auto at = std::upper_bound(scratch.list.begin(), scratch.list.end(), near);
      const auto place = at - scratch.list.begin();
      scratch.list.insert(at, near);
      scratch.expanded.insert(scratch.expanded.begin() + place, 0);
      if (scratch.list.size() > list_size) scratch.list.pop_back(), scratch.expanded.pop_back();
      first = std::min(first, static_cast<size_t>(place));
    }
  };
  scratch.see(begin);
  scratch.fresh.assign(1, begin);
  add(scratch.fresh);
  while (true) {
    while (first < scratch.list.size() && scratch.expanded[first]) ++first;
    if (first == scratch.list.size()) return;
    scratch.expanded[first] = 1;
    const Near near = scratch.list[first];
    scratch.passed.push_back(near);
    copy_neighbours(near.node, scratch.around);
    scratch.fresh.clear();
    for (const uint32_t node : scratch.around) {
      if (scratch.see(node)) scratch.fresh.push_back(node);
    }
    add(scratch.fresh);
  }
}

const std::vector<Near>& Vamana::prune(uint32_t node, float alpha, Scratch& scratch) const {
  auto& pool = scratch.pool;
  pool.erase(
      std::remove_if(pool.begin(), pool.end(), [&](const Near& each) { return each.node == node; }),
      pool.end());
  // a pass at alpha 1 leaves room: the next one chooses again
  return scratch.pruning.choose(pool, vectors_,
                                {options_.degree, alpha, options_.saturate && alpha > 1});
}

void Vamana::set_neighbours(uint32_t node, const std::vector<Near>& chosen) {
  uint32_t* edges = edges_.data() + node * capacity_;
  for (size_t i = 0; i < chosen.size(); ++i) edges[i] = chosen[i].node;
  degree_[node] = static_cast<uint16_t>(chosen.size());
}

void Vamana::insert(uint32_t node, float alpha, Scratch& scratch) {
  scratch.target.assign(vectors_.row(node));
  walk(medoid_, options_.list_size, scratch);
  scratch.pool = scratch.passed;
  copy_neighbours(node, scratch.fresh);  // of an earlier pass
  add_to_pool(scratch.fresh, scratch);
  scratch.linked = prune(node, alpha, scratch);
  lock(node);
  set_neighbours(node, scratch.linked);
  unlock(node);
  for (const Near& each : scratch.linked) link_back(each.node, node, each.distance, alpha, scratch);
}

void Vamana::link_back(uint32_t from, uint32_t to, float distance, float alpha, Scratch& scratch) {
  lock(from);
  uint32_t* begin = edges_.data() + from * capacity_;
  const int64_t degree = degree_[from];
  if (std::find(begin, begin + degree, to) != begin + degree) return unlock(from);
  if (degree < capacity_) {
    begin[degree] = to;
    ++degree_[from];
    return unlock(from);
  }
  scratch.fresh.assign(begin, begin + degree);
  unlock(from);
  scratch.pool.assign(1, {distance, to});
  scratch.target.assign(vectors_.row(from));
  add_to_pool(scratch.fresh, scratch);
  const std::vector<Near>& chosen = prune(from, alpha, scratch);
  lock(from);  // what others have added meanwhile is lost, as a few edges of many
  set_neighbours(from, chosen);
  unlock(from);
}

void Vamana::trim(uint32_t node, Scratch& scratch) {
  if (degree_[node] <= options_.degree) return;
  scratch.fresh.assign(neighbours_of(node), neighbours_of(node) + degree_[node]);
  scratch.pool.clear();
  scratch.target.assign(vectors_.row(node));
  add_to_pool(scratch.fresh, scratch);
  set_neighbours(node, prune(node, options_.alpha, scratch));
}

bool Vamana::build(const std::function<bool(int64_t, int64_t)>& progress) {
  const int64_t n = vectors_.n;
  if (n == 0) return true;
  medoid_ = find_medoid();
  std::vector<uint32_t> order(n);
  std::iota(order.begin(), order.end(), 0u);
  std::mt19937_64 random(options_.seed);
  std::shuffle(order.begin(), order.end(), random);
  std::vector<std::unique_ptr<Scratch>> scratch(std::max(1, options_.threads));
  std::atomic<bool> ends{false};
  std::atomic<int64_t> done{0};
  const int64_t total = n * (options_.passes + 1);  // the last is trimming
  auto shown = std::chrono::steady_clock::now();
  for (int pass = 0; pass <= options_.passes && !ends; ++pass) {
    const float alpha = pass + 1 < options_.passes ? 1.0f : options_.alpha;
    parallel_for(n, kBuildGrain, options_.threads, [&](int thread, int64_t begin, int64_t end) {
      if (ends) return;
      auto& own = scratch[thread];
      if (!own) own = std::make_unique<Scratch>(vectors_);
      for (int64_t i = begin; i < end; ++i) {
        if (pass == options_.passes) {
          trim(order[i], *own);
        } else {
          insert(order[i], alpha, *own);
        }
      }
      done += end - begin;
      if (thread == 0 && std::chrono::steady_clock::now() - shown > kProgressEvery) {
        shown = std::chrono::steady_clock::now();
        if (!progress(done, total)) ends = true;
      }
    });
  }
  return !ends && progress(total, total);
}

void Vamana::hold(VectorTable vectors) { vectors_ = vectors; }

void Vamana::insert_to(int64_t end) {
  const auto n = static_cast<size_t>(std::min(end, vectors_.n));
  if (n > degree_.size()) {
    const size_t room = std::max(n, degree_.size() + degree_.size() / 2);
    edges_.resize(room * capacity_);
    degree_.resize(room);
    locks_.reset(new std::atomic_flag[room]);
    for (size_t i = 0; i < room; ++i) locks_[i].clear();
  }
  ScratchPtr scratch = make_scratch();
  for (; inserted_ < static_cast<int64_t>(n); ++inserted_) {
    // the first one is where walks begin, and has nowhere to walk to
    if (inserted_ > 0) insert(static_cast<uint32_t>(inserted_), options_.alpha, *scratch);
  }
}

int64_t Vamana::size_bytes() const {
  return static_cast<int64_t>(edges_.capacity() * sizeof(uint32_t) +
                              degree_.capacity() * (sizeof(uint16_t) + sizeof(std::atomic_flag)));
}

Vamana::ScratchPtr Vamana::make_scratch() const {
  return {new Scratch(vectors_), [](Scratch* each) { delete each; }};
}

const std::vector<Near>& Vamana::nearest(const DistanceQuery& query, int64_t list_size,
                                         Scratch& scratch, int64_t& measured) {
  if (static_cast<int64_t>(scratch.seen.size()) < vectors_.n) scratch.seen.resize(vectors_.n);
  scratch.target = query;
  scratch.measured = 0;
  walk(medoid_, list_size, scratch);
  measured += scratch.measured;
  return scratch.list;
}

void Vamana::set_edges(const uint32_t* neighbours, const int64_t* counts, uint32_t medoid) {
  medoid_ = medoid;
  for (int64_t i = 0; i < vectors_.n; ++i) {
    std::copy_n(neighbours + i * options_.degree, counts[i], edges_.begin() + i * capacity_);
    degree_[i] = static_cast<uint16_t>(counts[i]);
  }
}

std::vector<char> Vamana::leading_to(uint32_t node) const {
  std::vector<char> leads(vectors_.n);
  leads[node] = 1;
  for (bool grows = true; grows;) {  // a few rounds: most nodes are a few edges away
    grows = false;
    for (int64_t i = 0; i < vectors_.n; ++i) {
      if (leads[i]) continue;
      const uint32_t* near = neighbours_of(i);
      if (!std::any_of(near, near + degree_[i], [&](uint32_t each) { return leads[each] != 0; }))
        continue;
      leads[i] = 1, grows = true;
    }
  }
  return leads;
}

// Puts `lost` into the farthest edge of `from`: from -> x becomes from -> lost -> x, so that
// whatever could be come to still can. Not into one that a repair has made, unless `any`: x would
// move away step by step.
bool Vamana::splice(uint32_t from, uint32_t lost, bool any, std::unordered_set<uint64_t>& made) {
  const auto key = [](uint32_t begin, uint32_t end) {
    return static_cast<uint64_t>(begin) << 32 | end;
  };
  uint32_t* edges = edges_.data() + from * capacity_;
  uint32_t* own = edges_.data() + lost * capacity_;
  if (degree_[from] < options_.degree) {
    edges[degree_[from]++] = lost;
  } else {
    int64_t at = degree_[from] - 1;
    while (!any && at >= 0 && made.count(key(from, edges[at]))) --at;
    if (at < 0) return false;
    const uint32_t end = edges[at];
    edges[at] = lost;
    if (degree_[lost] == options_.degree) --degree_[lost];
    own[degree_[lost]++] = end;
    made.insert(key(lost, end));
  }
  made.insert(key(from, lost));
  return true;
}

int64_t Vamana::connect(const std::vector<uint32_t>& entries) {
  if (vectors_.n == 0) return 0;
  std::vector<char> reached(vectors_.n);
  std::vector<uint32_t> waiting;
  const auto reach = [&](uint32_t first) {
    if (!reached[first]) reached[first] = 1, waiting.push_back(first);
    while (!waiting.empty()) {
      const uint32_t node = waiting.back();
      waiting.pop_back();
      for (int64_t i = 0; i < degree_[node]; ++i) {
        const uint32_t next = neighbours_of(node)[i];
        if (!reached[next]) reached[next] = 1, waiting.push_back(next);
      }
    }
  };
  for (const uint32_t entry : entries) reach(entry);
  Scratch scratch(vectors_);
  std::unordered_set<uint64_t> made;
  std::vector<uint32_t>
      last;  // that was repaired: of many vectors in one place each leads to the next
  int64_t repaired = 0;
  for (int64_t i = 0; i < vectors_.n; ++i) {
    if (reached[i]) continue;
    const auto lost = static_cast<uint32_t>(i);
    scratch.target.assign(vectors_.row(lost));
    walk(entries[0], options_.list_size, scratch);
    measure(last, scratch);
    for (size_t j = 0; j < last.size(); ++j) scratch.list.push_back({scratch.distance[j], last[j]});
    std::stable_sort(scratch.list.begin(), scratch.list.end(),
                     [](const Near& a, const Near& b) { return a.distance < b.distance; });
    const auto leads = [&](const Near& near) { return splice(near.node, lost, false, made); };
    if (std::none_of(scratch.list.begin(), scratch.list.end(), leads))
      splice(scratch.list[0].node, lost, true, made);
    ++repaired;
    last.assign(1, lost);
    reach(lost);
  }
  return repaired;
}

}  // namespace espnx::graph
