// One query's way through a graph in rounds (RAGX's metadata navigation, sections 3 and 4.3, with
// DiskANN's beam): the nodes that the nearest candidates need are read together, and what they say
// is used when all of them are there. So the walk depends on the graph and the query alone, and not
// on the order in which a drive answers. It does not know how nodes are read, or look.
//
// `GraphWalk` goes the other way about: on as each page arrives, and from every node in it whose
// vector is near enough. Here a node that came in the page of another is expanded when it is among
// the nearest candidates itself.
//
// Where codes say how far neighbours are, a node is read when it is expanded. Where nothing does,
// all neighbours of an expanded node are read. Either way what is found was measured to the vectors
// themselves.
//
// A graph with layers above (HNSW, arXiv 1603.09320, algorithm 5) is descended first, greedily, and
// with rounds like any other. A node that was met above alone is no result and no candidate until
// the walk meets it below, as in the paper; then it is not read again.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "candidates.hpp"
#include "nearest.hpp"

namespace espnx::graph {

struct RoundOptions {
  int64_t k = 10;
  int64_t list_size = 100;  // L
  int64_t beam_width = 1;   // W: candidates that are expanded in a round
  bool by_codes = false;
  std::optional<int64_t> upper_layers;  // of a graph that may have some
};

// What a walk in rounds asks for. What these throw ends it.
class NodeSource {
 public:
  virtual ~NodeSource() = default;

  // Reads a round's nodes, one or more, and tells the walk of each (`RoundWalk::arrived`), and of
  // others that came with them, if it likes.
  virtual void read(const std::vector<uint32_t>& nodes) = 0;

  // By codes: how far some neighbours of a node that was read are. `places`: of them among all its
  // neighbours.
  virtual std::vector<float> estimate(uint32_t node, const std::vector<uint32_t>& neighbours,
                                      const std::vector<int64_t>& places) = 0;

  // Of a node in a layer above; they are numbered from 1, the lowest.
  virtual std::vector<uint32_t> upper_neighbours(int64_t layer, uint32_t node) = 0;
};

class RoundWalk {
 public:
  explicit RoundWalk(const RoundOptions& options);

  // The k nearest of what was met, nearest first, ties by id. `entries`: where it begins, each
  // once. Once.
  std::vector<Found> run(NodeSource& source, const std::vector<uint32_t>& entries);

  // Whether a node has arrived.
  bool knows(uint32_t node) const { return places_.find(node) != nullptr; }

  // A node that was read, for the first time. `id`: what results call it.
  void arrived(uint32_t node, int64_t id, float distance, const std::vector<uint32_t>& neighbours);

 private:
  struct Node {
    uint32_t number;
    Found found;
    std::vector<uint32_t> neighbours;
    bool is_met;  // in the lowest layer
  };
  struct Place {
    uint32_t key_and_one = 0, at = 0;  // among `nodes_`
  };

  Node& at(uint32_t node);
  void read_unknown(NodeSource& source, const std::vector<uint32_t>& nodes);
  // To the node that the layers above lead to.
  uint32_t descend(NodeSource& source, const std::vector<uint32_t>& entries);
  void meet(Node& node);
  std::vector<uint32_t> neighbours_of(const std::vector<uint32_t>& taken);  // each once, by number
  void add_estimated(NodeSource& source, const std::vector<uint32_t>& expanded);
  void add_measured();
  std::vector<uint32_t> take();  // the nearest candidates that wait; they wait no more

  RoundOptions options_;
  CandidateList candidates_;
  Nearest nearest_;
  std::vector<Node> nodes_;  // that have arrived
  NodeTable<Place> places_;
  NodeSet estimated_;            // nodes whose distance was, or need not be
  std::vector<uint32_t> fresh_;  // met since candidates were last added
  bool is_below_ = false;        // nodes are met as they arrive
};

}  // namespace espnx::graph
