// See pack.hpp.
#include "pack.hpp"

#include <algorithm>

namespace espnx::graph {
namespace {

// Of the edges that lead to a node, so many are looked at: a hub has thousands.
constexpr int64_t kEdgesIn = 128;

// Edges turned round: who leads to node i, ends[begin[i]] to ends[begin[i + 1] - 1].
struct EdgesIn {
  std::vector<int64_t> begin;
  std::vector<uint32_t> ends;
};

EdgesIn turn_round(const Vamana& graph, int64_t n) {
  EdgesIn in;
  in.begin.resize(n + 1);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < graph.degree_of(i); ++j) ++in.begin[graph.neighbours_of(i)[j] + 1];
  }
  for (int64_t i = 0; i < n; ++i) in.begin[i + 1] += in.begin[i];
  in.ends.resize(in.begin[n]);
  std::vector<int64_t> next(in.begin.begin(), in.begin.end() - 1);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < graph.degree_of(i); ++j) {
      in.ends[next[graph.neighbours_of(i)[j]]++] = static_cast<uint32_t>(i);
    }
  }
  return in;
}

std::vector<uint32_t> breadth_first(const Vamana& graph, int64_t n) {
  std::vector<uint32_t> order;
  order.reserve(n);
  std::vector<char> seen(n);
  const auto see = [&](uint32_t node) {
    if (!seen[node]) seen[node] = 1, order.push_back(node);
  };
  see(graph.medoid());
  for (size_t at = 0; at < order.size(); ++at) {
    for (int64_t j = 0; j < graph.degree_of(order[at]); ++j) see(graph.neighbours_of(order[at])[j]);
  }
  for (int64_t i = 0; i < n; ++i)
    see(static_cast<uint32_t>(i));  // those that only other entry points lead to
  return order;
}

// The page that grows: who might join it, with how many edges to its members.
class GrowingPage {
 public:
  GrowingPage(const Vamana& graph, const VectorTable& vectors, const EdgesIn& in)
      : graph_(graph),
        vectors_(vectors),
        in_(in),
        place_(vectors.n, -1),
        taken_(vectors.n),
        query_(vectors.dim, vectors.format, Metric::kL2) {}

  bool is_taken(uint32_t node) const { return taken_[node]; }

  void begin(uint32_t seed) {
    for (const Candidate& each : candidates_) place_[each.node] = -1;
    candidates_.clear();
    query_.assign(vectors_.row(seed));
    take(seed);
  }

  // The one with the most edges to the page, of several the nearest to its first node; false where
  // there is none.
  bool take_next(uint32_t& node) {
    const Candidate* best = nullptr;
    for (Candidate& each : candidates_) {
      if (taken_[each.node] || (best != nullptr && each.edges < best->edges)) continue;
      if (each.distance < 0) {
        const uint8_t* row = vectors_.row(each.node);
        query_.measure(&row, 1, &each.distance);
      }
      if (best == nullptr || each.edges > best->edges || each.distance < best->distance)
        best = &each;
    }
    if (best == nullptr) return false;
    node = best->node;
    take(node);
    return true;
  }

 private:
  struct Candidate {
    uint32_t node;
    int32_t edges;
    float distance;  // negative: not measured yet
  };

  void take(uint32_t node) {
    taken_[node] = 1;
    for (int64_t j = 0; j < graph_.degree_of(node); ++j) meet(graph_.neighbours_of(node)[j]);
    const int64_t end = std::min(in_.begin[node + 1], in_.begin[node] + kEdgesIn);
    for (int64_t j = in_.begin[node]; j < end; ++j) meet(in_.ends[j]);
  }

  void meet(uint32_t node) {
    if (taken_[node]) return;
    if (place_[node] < 0) {
      place_[node] = static_cast<int32_t>(candidates_.size());
      candidates_.push_back({node, 0, -1});
    }
    ++candidates_[place_[node]].edges;
  }

  const Vamana& graph_;
  const VectorTable& vectors_;
  const EdgesIn& in_;
  std::vector<int32_t> place_;  // among the candidates
  std::vector<char> taken_;
  std::vector<Candidate> candidates_;
  DistanceQuery query_;  // the page's first node
};

}  // namespace

std::vector<uint32_t> pack_nodes(const Vamana& graph, const VectorTable& vectors,
                                 int64_t nodes_per_page) {
  if (vectors.n == 0) return {};
  const std::vector<uint32_t> seeds = breadth_first(graph, vectors.n);
  if (nodes_per_page == 1) return seeds;
  const EdgesIn in = turn_round(graph, vectors.n);
  GrowingPage page(graph, vectors, in);
  std::vector<uint32_t> order;
  order.reserve(vectors.n);
  size_t next_seed = 0;
  int64_t room = 0;
  while (order.size() < seeds.size()) {
    uint32_t node = 0;
    if (room == 0 || !page.take_next(node)) {
      while (page.is_taken(seeds[next_seed])) ++next_seed;
      node = seeds[next_seed];
      page.begin(node);  // alone in what is left of a page, too
      if (room == 0) room = nodes_per_page;
    }
    order.push_back(node);
    --room;
  }
  return order;
}

}  // namespace espnx::graph
