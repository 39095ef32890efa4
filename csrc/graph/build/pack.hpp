// Which nodes lie together in a page: those with the most edges between them, so that a page that
// is read for one of them brings others that the walk wants next (Starling's aim, by greedy
// growth).
#pragma once

#include <cstdint>
#include <vector>

#include "vamana.hpp"

namespace espnx::graph {

// order[i]: the node that gets number i; pages are filled one after the other, `nodes_per_page`
// each. Pages begin with nodes in the order of a breadth-first search from the medoid.
// Deterministic.
std::vector<uint32_t> pack_nodes(const Vamana& graph, const VectorTable& vectors,
                                 int64_t nodes_per_page);

}  // namespace espnx::graph
