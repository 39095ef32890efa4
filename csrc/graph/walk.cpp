// See walk.hpp.
#include "walk.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace espnx::graph {
namespace {

// Allowed nodes that a walk keeps, in lists of L: it ends long before the last.
constexpr int64_t kAllowedLists = 32;
// Nodes of a part that a walk over several goes to, if no others of it are near.
constexpr int64_t kOfPart = 2;
// Standard deviations.
constexpr double kByChance = 4;
constexpr double kNearlyAll = 0.9;

bool is_farther(const Candidate& a, const Candidate& b) { return b < a; }

}  // namespace

void GraphWalk::begin(const GraphView& view, const WalkOptions& options, const void* query,
                      const float* query_f32, const RowFilter* filter, const int64_t* absent,
                      const int64_t* parts, int64_t n_parts) {
  view_ = &view;
  options_ = options;
  filter_ = filter;
  choose_parts(parts, n_parts);
  absent_.clear();
  for (int64_t i = 0; absent != nullptr && i < view.copies; ++i) find_absent(absent[i]);
  if (view.layout.disk_pq_bytes > 0) {
    disk_table_.resize(view.disk_book.parts() * kCentroids);
    fill_table(view.disk_book, query_f32, view.metric, disk_table_.data());
  } else {
    exact_.emplace(query, view.layout.dim, view.layout.format, view.metric);
  }
  table_.resize(view.book.parts() * kCentroids);
  fill_table(view.book, query_f32, view.metric, table_.data());
  near_.clear(options.list_size);
  if (walked_.size() > 1) {
    of_parts_.resize(std::max(of_parts_.size(), walked_.size()));
    for (size_t i = 0; i < walked_.size(); ++i) of_parts_[i].clear(kOfPart);
  }
  allowed_.clear(kAllowedLists * std::max(options.list_size, options.far_list_size));
  met_.clear();
  listed_.clear();
  read_.clear();
  nearest_.clear(options.k);
  under_way_.clear();
  code_pages_.clear();
  beside_.clear();
  wide_.clear(options.far_list_size);
  is_near_done_ = is_far_ = is_wide_done_ = false;
  unchanged_ = n_allowed_ = n_led_to_ = spent_ = allowed_pages_asked_ = looked_through_ = 0;
  costs_ = {};
  for (const Absent& each : absent_)
    met_.add(static_cast<uint32_t>(each.node));  // so that it is no candidate
  for (const Walked& each : walked_) begin_in(each);
  if (filter == nullptr) return;
  for (const Walked& each : walked_) begin_at_allowed(each);
  n_allowed_ = 0;
  n_led_to_ = -costs_.estimates;
}

void GraphWalk::choose_parts(const int64_t* parts, int64_t n_parts) {
  walked_.clear();
  n_pages_ = filter_count_ = filter_pages_ = 0;
  const int64_t count = parts == nullptr ? static_cast<int64_t>(view_->parts.size()) : n_parts;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t number = parts == nullptr ? i : parts[i];
    const Part& part = view_->parts[number];
    const RowFilter::OfPart* allowed = filter_ == nullptr ? nullptr : &filter_->parts[number];
    walked_.push_back({&part, n_pages_, allowed});
    n_pages_ += view_->layout.pages_of(part);
    if (allowed == nullptr) continue;
    filter_count_ += allowed->count;
    filter_pages_ += allowed->pages;
  }
}

size_t GraphWalk::of_page_among_several(int64_t page) const {
  const auto begins_behind = [](int64_t number, const Walked& each) {
    return number < each.first_page;
  };
  const auto next = std::upper_bound(walked_.begin(), walked_.end(), page, begins_behind);
  return static_cast<size_t>(next - walked_.begin()) - 1;
}

void GraphWalk::find_absent(int64_t place) {
  if (place < 0) return;
  const int64_t page = place / view_->layout.nodes_per_page;
  for (const Walked& each : walked_) {
    const Part& part = *each.part;
    if (page < part.first_page || page >= part.first_page + view_->layout.pages_of(part)) continue;
    absent_.push_back({place + (each.first_page - part.first_page) * view_->layout.nodes_per_page,
                       part.end_entry - part.first_entry <= 1});
  }
}

const GraphWalk::Absent* GraphWalk::absent_at(int64_t node) const {
  for (const Absent& each : absent_) {
    if (each.node == node) return &each;
  }
  return nullptr;
}

// Of a part's entry points the nearest by its code is a candidate.
void GraphWalk::begin_in(const Walked& at) {
  const int64_t begin = at.part->first_entry, count = at.part->end_entry - begin;
  if (count == 0) return;
  fresh_codes_.resize(count);
  for (int64_t i = 0; i < count; ++i)
    fresh_codes_[i] = view_->entry_codes.data() + (begin + i) * view_->layout.code_bytes;
  estimate_.resize(count);
  estimate(table_.data(), view_->book.parts(), fresh_codes_.data(), count, estimate_.data());
  costs_.estimates += count;
  const auto node_of = [&](int64_t i) { return view_->entries[begin + i] + first_node(at); };
  for (int64_t i = 0; !absent_.empty() && i < count; ++i) {
    if (absent_at(node_of(i)) != nullptr) estimate_[i] = std::numeric_limits<float>::infinity();
  }
  const auto nearest = std::min_element(estimate_.begin(), estimate_.end()) - estimate_.begin();
  const auto node = static_cast<uint32_t>(node_of(nearest));
  met_.add(node);
  add_candidate({estimate_[nearest], node}, true, false);
}

void GraphWalk::begin_at_allowed(const Walked& at) {
  fresh_.clear();
  fresh_codes_.clear();
  for (int64_t i = at.filter->first_entry; i < at.filter->end_entry; ++i) {
    const auto node = static_cast<uint32_t>(filter_->entries[i] + first_node(at));
    if (!met_.add(node)) continue;
    fresh_.push_back(node);
    fresh_codes_.push_back(filter_->entry_codes.data() + i * view_->layout.code_bytes);
  }
  estimate_fresh(false);
}

bool GraphWalk::is_page_asked(int64_t page) const {
  return read_.has(static_cast<uint32_t>(page)) ||
         std::find(under_way_.begin(), under_way_.end(), page) != under_way_.end();
}

bool GraphWalk::is_beyond(float distance) const {
  if (!nearest_.is_full()) return false;
  const float farthest = nearest_.farthest();
  return distance - farthest > options_.stop_beyond * std::abs(farthest);
}

bool GraphWalk::has_allowed(int64_t page) const {
  const int64_t first = in_file(static_cast<uint32_t>(page * view_->layout.nodes_per_page));
  for (int64_t i = 0; i < nodes_of(page); ++i) {
    if (has_bit(filter_->nodes, first + i)) return true;
  }
  return false;
}

int64_t GraphWalk::missing() const { return std::min(options_.k, filter_count_) - nearest_.size(); }

// Pages without allowed nodes are read only while enough are left for those with the results that
// are still missing.
bool GraphWalk::affords_other() const {
  return filter_pages_ - spent_ - 1 >= std::min(missing(), filter_pages_ - allowed_pages_asked_);
}

bool GraphWalk::affords(int64_t page) const {
  return spent_ < filter_pages_ && (has_allowed(page) || affords_other());
}

int64_t GraphWalk::wanted_in(CandidateList& list) {
  const auto is_over = [this](uint32_t node) { return is_asked(node); };
  while (const Candidate* nearest = list.nearest_waiting(is_over)) {
    if (is_beyond(nearest->distance)) break;
    const int64_t page = view_->layout.page_of(nearest->node);
    if (filter_ == nullptr || affords(page)) return page;
    list.drop_nearest();
  }
  return -1;
}

// Parts come before the list, which has what is near in all of them only then.
int64_t GraphWalk::wanted_of_parts() {
  if (walked_.size() == 1) return -1;
  for (size_t i = 0; i < walked_.size(); ++i) {
    const int64_t page = wanted_in(of_parts_[i]);
    if (page >= 0) return page;
  }
  return -1;
}

int64_t GraphWalk::wanted_page() {
  int64_t page = wanted_of_parts();
  if (page < 0) page = wanted_in(near_);
  return page < 0 && filter_ != nullptr ? wanted_of_filter() : page;
}

// Where rows are allowed whatever lies near, about as many of the nodes that the query led to are
// as of all, or nearly all of those are. Else allowed ones lie to one side of it, or elsewhere, and
// are harder to come by.
bool GraphWalk::is_far_from_allowed() const {
  double n_nodes = 0;
  for (const Walked& each : walked_) n_nodes += static_cast<double>(each.part->n);
  const double share = static_cast<double>(filter_count_) / n_nodes;
  const auto met = static_cast<double>(n_led_to_ + costs_.estimates),
             allowed = static_cast<double>(n_allowed_);
  const double off = std::abs(allowed - share * met);
  return off > kByChance * std::sqrt(share * (1 - share) * met) && allowed < kNearlyAll * met;
}

int64_t GraphWalk::wanted_of_filter() {
  const bool is_idle = under_way_.empty() && code_pages_.empty();
  if (!is_near_done_) {
    if (!is_idle) return -1;
    is_near_done_ = true;
    unchanged_ = 0;
    is_far_ = is_far_from_allowed();
  }
  int64_t page = -1;
  if (is_far_ && !is_wide_done_) {
    page = wanted_in(wide_);
    if (page >= 0 || !is_idle) return page;
    is_wide_done_ = true;
    unchanged_ = 0;
  }
  if (missing() <= 0 && unchanged_ >= (is_far_ ? options_.far_list_size : options_.list_size))
    return -1;
  page = wanted_in(allowed_);
  if (page >= 0 || !is_idle) return page;
  page = wanted_beside_allowed();
  if (page >= 0 || missing() <= 0) return page;
  for (; looked_through_ < n_pages_; ++looked_through_) {
    if (has_allowed(looked_through_) && !is_page_asked(looked_through_)) return looked_through_;
  }
  return -1;
}

// While fewer allowed nodes than L are met.
int64_t GraphWalk::wanted_beside_allowed() {
  while (!beside_.empty() && allowed_.size() < std::min(options_.list_size, filter_count_)) {
    const Candidate nearest = beside_.front();
    if (is_beyond(nearest.distance)) return -1;
    const int64_t page = view_->layout.page_of(nearest.node);
    if (!is_asked(nearest.node) && affords(page)) return page;
    std::pop_heap(beside_.begin(), beside_.end(), is_farther);
    beside_.pop_back();
  }
  return -1;
}

std::optional<Want> GraphWalk::next_page() {
  for (CodePage& each : code_pages_) {
    if (each.asked) continue;
    if (filter_ != nullptr && !affords_other()) break;
    each.asked = true;
    ++spent_;
    return Want{true, each.page};
  }
  const auto is_given_up = [](const CodePage& each) {
    return !each.asked;
  };  // there is no page left for it
  code_pages_.erase(std::remove_if(code_pages_.begin(), code_pages_.end(), is_given_up),
                    code_pages_.end());
  if (!code_pages_.empty()) return std::nullopt;
  if (static_cast<int64_t>(under_way_.size()) >= options_.beam_width) return std::nullopt;
  const int64_t page = wanted_page();
  if (page < 0) return std::nullopt;
  under_way_.push_back(page);
  ++costs_.pages;
  ++spent_;
  if (filter_ != nullptr && has_allowed(page)) ++allowed_pages_asked_;
  return Want{false, page};
}

bool GraphWalk::fits_filter(int64_t page, const uint8_t* bytes) const {
  if (filter_ == nullptr) return true;
  const int64_t first = in_file(static_cast<uint32_t>(page * view_->layout.nodes_per_page));
  for (int64_t i = 0; i < nodes_of(page); ++i) {
    const int64_t row = NodeView(view_->layout, bytes, i).row();
    if (has_bit(filter_->rows, row) != has_bit(filter_->nodes, first + i)) return false;
  }
  return true;
}

void GraphWalk::arrived(int64_t page, const uint8_t* bytes) {
  const PageLayout& layout = view_->layout;
  under_way_.erase(std::find(under_way_.begin(), under_way_.end(), page));
  read_.add(static_cast<uint32_t>(page));
  ++unchanged_;
  // Every vector of the page is measured: it is here.
  const Walked& at = walked_[of_page(page)];
  const auto part_begin = static_cast<uint32_t>(first_node(at));
  const int64_t count = layout.nodes_of(*at.part, page - at.first_page);
  const auto first = static_cast<uint32_t>(page * layout.nodes_per_page);
  rows_.resize(count);
  distance_.resize(count);
  for (int64_t i = 0; i < count; ++i) rows_[i] = NodeView(layout, bytes, i).vector();
  measure(count);
  for (int64_t i = 0; i < count; ++i) {
    const NodeView node(layout, bytes, i);
    const uint32_t number = first + static_cast<uint32_t>(i);
    if (const Absent* absent = absent_at(number)) {
      if (!absent->is_gone_by) continue;
    } else {
      keep(distance_[i], node.row());
    }
    met_.add(number);
    // One that came with another is expanded if it is as near as those of the list.
    if (!holds(number) && !add_candidate({distance_[i], number}, false, false)) continue;
    expand(node, number, part_begin);
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

bool GraphWalk::holds(uint32_t node) const {
  const float* distance = listed_.find(node);
  if (distance == nullptr) return false;
  const Candidate candidate{*distance, node};
  if (near_.holds(candidate)) return true;
  if (walked_.size() > 1 && of_parts_[of_node(node)].holds(candidate)) return true;
  if (filter_ == nullptr) return false;
  return (is_far_ && wide_.holds(candidate)) || (is_allowed(node) && allowed_.holds(candidate));
}

void GraphWalk::expand(const NodeView& node, uint32_t number, uint32_t part_begin) {
  const bool is_beside_allowed = filter_ != nullptr && is_allowed(number);
  fresh_.clear();
  fresh_codes_.clear();
  const PageLayout& layout = view_->layout;
  for (int64_t i = 0; i < node.n_neighbours(); ++i) {
    const uint32_t neighbour = part_begin + node.neighbour(i);
    if (!met_.add(neighbour)) continue;
    const bool is_inline = i < layout.inline_codes;
    if (!is_inline && layout.paged_codes) {
      const int64_t page = layout.code_page_of(neighbour);
      const auto is_it = [=](const CodePage& each) {
        return each.page == page && !each.asked && each.is_beside_allowed == is_beside_allowed;
      };
      auto at = std::find_if(code_pages_.begin(), code_pages_.end(), is_it);
      if (at == code_pages_.end())
        at = code_pages_.insert(at, {page, false, is_beside_allowed, {}});
      at->nodes.push_back(neighbour);
      continue;
    }
    fresh_.push_back(neighbour);
    fresh_codes_.push_back(is_inline ? node.code(i) : view_->codes + neighbour * layout.code_bytes);
    if (!is_inline) __builtin_prefetch(fresh_codes_.back());  // anywhere in memory
  }
  estimate_fresh(is_beside_allowed);
}

void GraphWalk::codes_arrived(int64_t page, const uint8_t* bytes, bool was_read) {
  costs_.code_pages += was_read ? 1 : 0;
  const auto is_it = [page](const CodePage& each) { return each.page == page && each.asked; };
  const auto at = std::find_if(code_pages_.begin(), code_pages_.end(), is_it);
  fresh_ = std::move(at->nodes);
  const bool is_beside_allowed = at->is_beside_allowed;
  code_pages_.erase(at);
  fresh_codes_.clear();
  const int64_t first = page * view_->layout.codes_per_page();
  // Those whose page has come meanwhile were measured.
  const auto is_read = [this](uint32_t node) {
    return read_.has(static_cast<uint32_t>(view_->layout.page_of(node)));
  };
  fresh_.erase(std::remove_if(fresh_.begin(), fresh_.end(), is_read), fresh_.end());
  for (const uint32_t node : fresh_) {
    fresh_codes_.push_back(bytes + kPageHeaderBytes + (node - first) * view_->layout.code_bytes);
  }
  estimate_fresh(is_beside_allowed);
}

void GraphWalk::estimate_fresh(bool is_beside_allowed) {
  estimate_.resize(fresh_.size());
  estimate(table_.data(), view_->book.parts(), fresh_codes_.data(),
           static_cast<int64_t>(fresh_.size()), estimate_.data());
  costs_.estimates += static_cast<int64_t>(fresh_.size());
  for (size_t i = 0; i < fresh_.size(); ++i)
    add_candidate({estimate_[i], fresh_[i]}, true, is_beside_allowed);
}

bool GraphWalk::add_candidate(const Candidate& candidate, bool waits, bool is_beside_allowed) {
  bool is_listed = near_.add(candidate, waits);
  if (walked_.size() > 1) is_listed |= of_parts_[of_node(candidate.node)].add(candidate, waits);
  bool counts = is_listed;
  if (filter_ != nullptr) {
    const bool is_wide = wide_.add(candidate, waits), may = is_allowed(candidate.node);
    const bool is_among_allowed = may && allowed_.add(candidate, waits);
    is_listed |= is_wide || is_among_allowed;
    counts |= (is_wide && is_far_) || is_among_allowed;
    n_allowed_ += may && waits;
    if (!may && waits && is_beside_allowed && !counts && allowed_.size() < options_.list_size) {
      beside_.push_back(candidate);
      std::push_heap(beside_.begin(), beside_.end(), is_farther);
    }
  }
  if (is_listed) listed_.add(candidate);
  return counts;
}

void GraphWalk::keep(float distance, int64_t row) {
  if (filter_ != nullptr && !has_bit(filter_->rows, row)) return;
  if (view_->copies > 1 && nearest_.has(row)) return;
  if (nearest_.keep({distance, row})) unchanged_ = 0;
}

}  // namespace espnx::graph
