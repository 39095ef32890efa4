// See walk.hpp.
#include "walk.hpp"

#include <algorithm>

namespace espnx::graph {
namespace {

constexpr size_t kFewSlots = 1024;

size_t slot_of(uint32_t node, size_t n_slots) {
  return static_cast<size_t>((node * uint64_t{0x9E3779B97F4A7C15}) >> 32) & (n_slots - 1);
}

}  // namespace

void NodeSet::clear() {
  if (slots_.empty()) slots_.resize(kFewSlots);
  std::fill(slots_.begin(), slots_.end(), 0);
  count_ = 0;
}

bool NodeSet::add(uint32_t node) {
  if (2 * count_ >= slots_.size()) grow();
  for (size_t at = slot_of(node, slots_.size());; at = (at + 1) & (slots_.size() - 1)) {
    if (slots_[at] == node + 1) return false;
    if (slots_[at] == 0) {
      slots_[at] = node + 1;
      ++count_;
      return true;
    }
  }
}

bool NodeSet::has(uint32_t node) const {
  for (size_t at = slot_of(node, slots_.size());; at = (at + 1) & (slots_.size() - 1)) {
    if (slots_[at] == node + 1) return true;
    if (slots_[at] == 0) return false;
  }
}

void NodeSet::grow() {
  std::vector<uint32_t> old(std::max(kFewSlots, 2 * slots_.size()));
  old.swap(slots_);
  count_ = 0;
  for (const uint32_t each : old) {
    if (each != 0) add(each - 1);
  }
}

void GraphWalk::begin(const GraphView& view, const WalkOptions& options, const void* query, const float* query_f32,
                      const uint8_t* allowed) {
  view_ = &view;
  options_ = options;
  allowed_ = allowed;
  if (view.layout.disk_pq_bytes > 0) {
    disk_table_.resize(view.disk_book.parts() * kCentroids);
    fill_table(view.disk_book, query_f32, view.metric, disk_table_.data());
  } else {
    exact_.emplace(query, view.layout.dim, view.layout.format, view.metric);
  }
  table_.resize(view.book.parts() * kCentroids);
  fill_table(view.book, query_f32, view.metric, table_.data());
  list_.clear();
  met_.clear();
  read_.clear();
  nearest_.clear();
  under_way_.clear();
  code_pages_.clear();
  costs_ = {};
  const auto n_entries = static_cast<int64_t>(view.entries.size());
  if (n_entries == 0) return;
  fresh_codes_.resize(n_entries);
  for (int64_t i = 0; i < n_entries; ++i) fresh_codes_[i] = view.entry_codes.data() + i * view.layout.code_bytes;
  estimate_.resize(n_entries);
  estimate(table_.data(), view.book.parts(), fresh_codes_.data(), n_entries, estimate_.data());
  costs_.estimates += n_entries;
  const auto nearest = std::min_element(estimate_.begin(), estimate_.end()) - estimate_.begin();
  met_.add(view.entries[nearest]);
  add_candidate({estimate_[nearest], view.entries[nearest], true});
}

size_t GraphWalk::first_waiting() const {
  size_t at = 0;
  while (at < list_.size() && !list_[at].waits) ++at;
  if (at == list_.size() || static_cast<int64_t>(nearest_.size()) < options_.k) return at;
  const float farthest = nearest_.front().distance;
  return list_[at].distance - farthest > options_.stop_beyond * std::abs(farthest) ? list_.size() : at;
}

std::optional<Want> GraphWalk::next_page() {
  for (CodePage& each : code_pages_) {
    if (each.asked) continue;
    each.asked = true;
    return Want{true, each.page};
  }
  if (!code_pages_.empty()) return std::nullopt;
  if (static_cast<int64_t>(under_way_.size()) >= options_.beam) return std::nullopt;
  for (size_t at = first_waiting(); at < list_.size(); ++at) {
    if (!list_[at].waits) continue;
    const int64_t page = view_->layout.page_of(list_[at].node);
    if (std::find(under_way_.begin(), under_way_.end(), page) != under_way_.end()) continue;  // it is coming
    under_way_.push_back(page);
    ++costs_.pages;
    return Want{false, page};
  }
  return std::nullopt;
}

void GraphWalk::arrived(int64_t page, const uint8_t* bytes) {
  const PageLayout& layout = view_->layout;
  under_way_.erase(std::find(under_way_.begin(), under_way_.end(), page));
  read_.add(static_cast<uint32_t>(page));
  // Every vector of the page is measured: it is here.
  const int64_t count = layout.nodes_of(page);
  const auto first = static_cast<uint32_t>(page * layout.nodes_per_page);
  rows_.resize(count);
  distance_.resize(count);
  for (int64_t i = 0; i < count; ++i) rows_[i] = NodeView(layout, bytes, i).vector();
  measure(count);
  for (int64_t i = 0; i < count; ++i) {
    const NodeView node(layout, bytes, i);
    const uint32_t number = first + static_cast<uint32_t>(i);
    keep(distance_[i], node.row());
    met_.add(number);
    // One that came with another is expanded if it is as near as those of the list.
    if (!stop_waiting(number) && !add_candidate({distance_[i], number, false})) continue;
    expand(node);
  }
}

void GraphWalk::measure(int64_t count) {
  if (exact_) {
    exact_->measure(rows_.data(), count, distance_.data());
  } else {
    estimate(disk_table_.data(), view_->disk_book.parts(), rows_.data(), count, distance_.data());
  }
  costs_.distances += count;
}

bool GraphWalk::stop_waiting(uint32_t node) {
  for (auto& each : list_) {
    if (each.node != node) continue;
    each.waits = false;
    return true;
  }
  return false;
}

void GraphWalk::expand(const NodeView& node) {
  fresh_.clear();
  fresh_codes_.clear();
  const PageLayout& layout = view_->layout;
  for (int64_t i = 0; i < node.n_neighbours(); ++i) {
    const uint32_t neighbour = node.neighbour(i);
    if (!met_.add(neighbour)) continue;
    const bool is_inline = i < layout.inline_codes;
    if (!is_inline && layout.paged_codes) {
      const int64_t page = layout.code_page_of(neighbour);
      const auto is_it = [page](const CodePage& each) { return each.page == page && !each.asked; };
      auto at = std::find_if(code_pages_.begin(), code_pages_.end(), is_it);
      if (at == code_pages_.end()) at = code_pages_.insert(at, {page, false, {}});
      at->nodes.push_back(neighbour);
      continue;
    }
    fresh_.push_back(neighbour);
    fresh_codes_.push_back(is_inline ? node.code(i) : view_->codes + neighbour * layout.code_bytes);
    if (!is_inline) __builtin_prefetch(fresh_codes_.back());  // anywhere in memory
  }
  estimate_fresh();
}

void GraphWalk::codes_arrived(int64_t page, const uint8_t* bytes, bool was_read) {
  costs_.code_pages += was_read ? 1 : 0;
  const auto is_it = [page](const CodePage& each) { return each.page == page && each.asked; };
  const auto at = std::find_if(code_pages_.begin(), code_pages_.end(), is_it);
  fresh_ = std::move(at->nodes);
  code_pages_.erase(at);
  fresh_codes_.clear();
  const int64_t first = page * view_->layout.codes_per_page();
  // Those whose page has come meanwhile were measured.
  const auto is_read = [this](uint32_t node) { return read_.has(static_cast<uint32_t>(view_->layout.page_of(node))); };
  fresh_.erase(std::remove_if(fresh_.begin(), fresh_.end(), is_read), fresh_.end());
  for (const uint32_t node : fresh_) {
    fresh_codes_.push_back(bytes + kPageHeaderBytes + (node - first) * view_->layout.code_bytes);
  }
  estimate_fresh();
}

void GraphWalk::estimate_fresh() {
  estimate_.resize(fresh_.size());
  estimate(table_.data(), view_->book.parts(), fresh_codes_.data(), static_cast<int64_t>(fresh_.size()),
           estimate_.data());
  costs_.estimates += static_cast<int64_t>(fresh_.size());
  for (size_t i = 0; i < fresh_.size(); ++i) add_candidate({estimate_[i], fresh_[i], true});
}

bool GraphWalk::add_candidate(Candidate candidate) {
  // By number where distances are equal, so that the list does not depend on the order in which candidates come.
  if (static_cast<int64_t>(list_.size()) == options_.list_size && !(candidate < list_.back())) return false;
  list_.insert(std::upper_bound(list_.begin(), list_.end(), candidate), candidate);
  if (static_cast<int64_t>(list_.size()) > options_.list_size) list_.pop_back();
  return true;
}

void GraphWalk::keep(float distance, uint32_t row) {
  if (allowed_ != nullptr && !(allowed_[row / 8] >> (row % 8) & 1)) return;
  const Found found{distance, row};
  if (static_cast<int64_t>(nearest_.size()) < options_.k) {
    nearest_.push_back(found);
    std::push_heap(nearest_.begin(), nearest_.end());
  } else if (found < nearest_.front()) {
    std::pop_heap(nearest_.begin(), nearest_.end());
    nearest_.back() = found;
    std::push_heap(nearest_.begin(), nearest_.end());
  }
}

std::vector<Found> GraphWalk::nearest() const {
  std::vector<Found> found = nearest_;
  std::sort_heap(found.begin(), found.end());
  return found;
}

std::vector<Found> GraphWalk::results() {
  std::sort_heap(nearest_.begin(), nearest_.end());
  return std::move(nearest_);
}

}  // namespace espnx::graph
