// See rounds.hpp.
#include "rounds.hpp"

#include <algorithm>
#include <iterator>
#include <stdexcept>

namespace espnx::graph {
namespace {

void sort_each_once(std::vector<uint32_t>& nodes) {
  std::sort(nodes.begin(), nodes.end());
  nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
}

}  // namespace

RoundWalk::RoundWalk(const RoundOptions& options) : options_(options) {
  candidates_.clear(options.list_size);
  nearest_.clear(options.k);
  places_.clear();
  estimated_.clear();
}

std::vector<Found> RoundWalk::run(NodeSource& source, const std::vector<uint32_t>& entries) {
  if (entries.empty()) return {};
  read_unknown(source, entries);
  std::vector<uint32_t> taken = entries;
  if (options_.upper_layers) {
    taken = {descend(source, entries)};
    meet(at(taken.front()));
  } else {
    for (Node& each : nodes_) meet(each);
  }
  is_below_ = true;
  for (const uint32_t node : taken) estimated_.add(node);
  while (true) {
    options_.by_codes ? add_estimated(source, taken) : add_measured();
    taken = take();
    if (taken.empty()) return nearest_.sorted();
    const std::vector<uint32_t> wanted = options_.by_codes ? taken : neighbours_of(taken);
    for (const uint32_t node : wanted) {
      if (knows(node)) meet(at(node));
    }
    read_unknown(source, wanted);
  }
}

void RoundWalk::arrived(uint32_t node, int64_t id, float distance,
                        const std::vector<uint32_t>& neighbours) {
  places_.add({node + 1, static_cast<uint32_t>(nodes_.size())});
  nodes_.push_back({node, {distance, id}, neighbours, false});
  if (is_below_) meet(nodes_.back());
}

RoundWalk::Node& RoundWalk::at(uint32_t node) {
  const Place* place = places_.find(node);
  if (place == nullptr) throw std::logic_error("a node of a walk was not read");
  return nodes_[place->at];
}

void RoundWalk::read_unknown(NodeSource& source, const std::vector<uint32_t>& nodes) {
  std::vector<uint32_t> unknown;
  std::copy_if(nodes.begin(), nodes.end(), std::back_inserter(unknown),
               [this](uint32_t node) { return !knows(node); });
  if (unknown.empty()) return;
  source.read(unknown);
  for (const uint32_t node : unknown) at(node);  // throws where it has not arrived
}

uint32_t RoundWalk::descend(NodeSource& source, const std::vector<uint32_t>& entries) {
  const auto is_nearest = [this](uint32_t a, uint32_t b) {
    return is_nearer(at(a).found.distance, a, at(b).found.distance, b);
  };
  uint32_t nearest = *std::min_element(entries.begin(), entries.end(), is_nearest);
  for (int64_t layer = *options_.upper_layers; layer > 0;) {
    const std::vector<uint32_t> near = source.upper_neighbours(layer, nearest);
    std::vector<uint32_t> sorted = near;
    sort_each_once(sorted);
    read_unknown(source, sorted);
    const uint32_t before = nearest;
    for (const uint32_t node :
         near) {  // in their order: of equally near ones the first, as FAISS does
      if (at(node).found.distance < at(nearest).found.distance) nearest = node;
    }
    if (nearest == before) --layer;
  }
  return nearest;
}

void RoundWalk::meet(Node& node) {
  if (node.is_met) return;
  node.is_met = true;
  nearest_.keep(node.found);
  if (!options_.by_codes) fresh_.push_back(node.number);
}

std::vector<uint32_t> RoundWalk::neighbours_of(const std::vector<uint32_t>& taken) {
  std::vector<uint32_t> near;
  for (const uint32_t node : taken) {
    const std::vector<uint32_t>& own = at(node).neighbours;
    near.insert(near.end(), own.begin(), own.end());
  }
  sort_each_once(near);
  return near;
}

void RoundWalk::add_estimated(NodeSource& source, const std::vector<uint32_t>& expanded) {
  for (const uint32_t node : expanded) {
    const std::vector<uint32_t>& near = at(node).neighbours;
    std::vector<uint32_t> fresh;
    std::vector<int64_t> places;
    for (size_t i = 0; i < near.size(); ++i) {
      if (!estimated_.add(near[i])) continue;
      fresh.push_back(near[i]);
      places.push_back(static_cast<int64_t>(i));
    }
    if (fresh.empty()) continue;
    const std::vector<float> distance = source.estimate(node, fresh, places);
    for (size_t i = 0; i < fresh.size(); ++i) candidates_.add({distance.at(i), fresh[i]}, true);
  }
}

void RoundWalk::add_measured() {
  for (const uint32_t node : fresh_) candidates_.add({at(node).found.distance, node}, true);
  fresh_.clear();
}

std::vector<uint32_t> RoundWalk::take() {
  const auto is_over = [](uint32_t) { return false; };
  std::vector<uint32_t> taken;
  while (static_cast<int64_t>(taken.size()) < options_.beam_width) {
    const Candidate* nearest = candidates_.nearest_waiting(is_over);
    if (nearest == nullptr) break;
    taken.push_back(nearest->node);
    candidates_.drop_nearest();
  }
  return taken;
}

}  // namespace espnx::graph
