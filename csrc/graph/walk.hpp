// One query's way through a graph on storage: which page it wants next, and what it learns from
// those that arrive. Knows nothing of how they are read.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "candidates.hpp"
#include "codebook.hpp"
#include "nearest.hpp"
#include "page.hpp"

namespace espnx::graph {

// Where pages lie: in a file of their own, or inside another. Without a path there is no such file.
struct PagesAt {
  std::string path;
  int64_t begin = 0;  // in bytes
};

// A graph on storage as a searcher sees it, or several: what every walk over them shares.
struct GraphView {
  std::vector<PagesAt> pages;  // one or more; the parts say in which they are
  PagesAt code_pages;          // of its codes where they are paged
  PageLayout layout;
  std::vector<Part> parts;  // one or more; where codes are paged or in memory, one
  int64_t copies = 1;       // nodes that a row may have, each in another part
  Metric metric = Metric::kL2;
  Codebook book;
  Codebook disk_book;  // of the codes that nodes have in place of vectors, where they do
  const uint8_t* codes =
      nullptr;  // [n, code_bytes] of all nodes, where they are in memory; else null
  std::shared_ptr<void> codes_owner;
  std::vector<uint32_t> entries;     // of each part; walks begin at the nearest by its code
  std::vector<uint8_t> entry_codes;  // [entries, code_bytes]
};

struct WalkOptions {
  int64_t k = 10;
  int64_t list_size = 100;  // L
  // Where a filter allows some rows alone: L of a query around which others are allowed than
  // elsewhere.
  int64_t far_list_size = 100;
  int64_t beam_width = 1;  // W: pages under way at a time
  // Ends when the nearest candidate left is farther than the k-th nearest vector by this share of
  // its distance, squared. Infinity: never before the list is done.
  float stop_beyond = std::numeric_limits<float>::infinity();
};

struct WalkCosts {
  int64_t pages = 0, code_pages = 0, distances = 0, estimates = 0;
};

// A page that a walk wants.
struct Want {
  bool is_codes;  // of codes, and not of nodes
  int64_t page;   // as the walk counts them
};

// A page where it lies.
struct PagePlace {
  const Part* part;
  int64_t page;  // of the part
};

// Rows that alone may be found, as a walk needs them. It has two lists then. That of the nearest of
// all nodes brings it to the query, wherever that is. After it comes that of the nodes that are
// allowed, from entry points of theirs on, until as many pages as L brought nothing nearer, or more
// where the query is far from what is allowed. Where it ends before L of them are met, the walk
// goes on beside those that were, and at last at any, until k rows are found or there are no more.
// It never reads more pages than there are with allowed nodes: measuring all of those would find
// everything.
struct RowFilter {
  struct OfPart {
    int64_t count = 0;                       // how many may be found
    int64_t pages = 0;                       // on which they lie: no walk reads more
    int64_t first_entry = 0, end_entry = 0;  // among `entries`
  };
  const uint8_t* rows = nullptr;   // a bit for each row
  const uint8_t* nodes = nullptr;  // the same of nodes, by their places in the file
  std::vector<OfPart> parts;       // of the view's
  std::vector<uint32_t> entries;   // some of their nodes, at which walks begin, too
  std::vector<uint8_t> entry_codes;
};

inline bool has_bit(const uint8_t* bits, int64_t at) { return bits[at / 8] >> (at % 8) & 1; }

// A walk over several parts at a time counts their pages one after the other, the nearest part's
// first, and their nodes by these, so that places of a last page stay empty. In each part it goes
// to the nearest nodes that it comes to there, a few of them, however near those of other parts
// are: else a part whose entry point is far would never be looked into. Its list is of all parts'
// nodes: beyond those few a part reads no page once others have nearer candidates.
class GraphWalk {
 public:
  // `query`: as DistanceQuery takes it, and as float32. `filter`: null: all rows may be found.
  // `absent`: the places in the file, as many as a row has copies, of nodes that are neither found
  // nor gone by, as if the graph had been built without them; negative ones are none, and so is
  // null. `parts`: numbers of those to walk over, `n_parts`, the nearest first; null: all.
  void begin(const GraphView& view, const WalkOptions& options, const void* query,
             const float* query_f32, const RowFilter* filter, const int64_t* absent = nullptr,
             const int64_t* parts = nullptr, int64_t n_parts = 0);

  // Where a page of nodes is.
  PagePlace place_of(int64_t page) const {
    const Walked& at = walked_[of_page(page)];
    return {at.part, page - at.first_page};
  }

  // The page to read next, unless so many are under way, or nothing is left to read. It is under
  // way from here on. Where codes are paged, those of a node's neighbours come before anything
  // else: which node is next depends on them.
  std::optional<Want> next_page();

  // Whether a page of nodes says of each the row that the filter was made by.
  bool fits_filter(int64_t page, const uint8_t* bytes) const;

  // A page of nodes that was asked for, checked.
  void arrived(int64_t page, const uint8_t* bytes);

  // A page of codes that was asked for, checked. `was_read`: or it was in memory, and counts for
  // nothing.
  void codes_arrived(int64_t page, const uint8_t* bytes, bool was_read);

  // Nothing is left, and nothing under way.
  bool done() { return under_way_.empty() && code_pages_.empty() && wanted_page() < 0; }

  // The k nearest of all vectors that were measured so far, nearest first, ties by row.
  std::vector<Found> nearest() const { return nearest_.sorted(); }

  const WalkCosts& costs() const { return costs_; }

 private:
  // A part, and where it begins as the walk counts.
  struct Walked {
    const Part* part;
    int64_t first_page;
    const RowFilter::OfPart* filter;
  };
  // A node as the walk counts. Where it is the only entry point of its part, it is gone by all the
  // same: else no walk would come anywhere.
  struct Absent {
    int64_t node;
    bool is_gone_by;
  };

  size_t of_page(int64_t page) const {  // the part that it is of
    return walked_.size() == 1 ? 0 : of_page_among_several(page);
  }
  size_t of_page_among_several(int64_t page) const;
  size_t of_node(uint32_t node) const { return of_page(view_->layout.page_of(node)); }
  int64_t nodes_of(int64_t page) const {
    const PagePlace at = place_of(page);
    return view_->layout.nodes_of(*at.part, at.page);
  }
  int64_t first_node(const Walked& at) const {
    return at.first_page * view_->layout.nodes_per_page;
  }
  // The place of a node in the file.
  int64_t in_file(uint32_t node) const {
    const Walked& at = walked_[of_page(view_->layout.page_of(node))];
    return node + (at.part->first_page - at.first_page) * view_->layout.nodes_per_page;
  }
  void choose_parts(const int64_t* parts, int64_t n_parts);
  void find_absent(int64_t place);
  const Absent* absent_at(int64_t node) const;  // or null
  void begin_in(const Walked& at);
  void begin_at_allowed(const Walked& at);
  int64_t wanted_page();  // of nodes, which is to be read next, or -1
  int64_t wanted_of_filter();
  int64_t wanted_in(CandidateList& list);
  int64_t wanted_of_parts();
  int64_t wanted_beside_allowed();
  bool is_page_asked(int64_t page) const;
  bool is_asked(uint32_t node) const { return is_page_asked(view_->layout.page_of(node)); }
  bool is_beyond(float distance) const;
  bool affords(int64_t page) const;
  bool affords_other() const;
  bool has_allowed(int64_t page) const;
  bool is_allowed(uint32_t node) const { return has_bit(filter_->nodes, in_file(node)); }
  int64_t missing() const;  // results, to what there will be
  bool is_far_from_allowed() const;
  bool add_candidate(const Candidate& candidate, bool waits,
                     bool is_beside_allowed);  // false: it is too far
  bool holds(uint32_t node) const;
  // `part_begin`: the first node of its part.
  void expand(const NodeView& node, uint32_t number, uint32_t part_begin);
  void estimate_fresh(bool is_beside_allowed);  // and makes candidates of them
  void keep(float distance, int64_t row);
  void measure(int64_t count);  // distance_ of what lies at rows_

  const GraphView* view_ = nullptr;
  WalkOptions options_;
  const RowFilter* filter_ = nullptr;
  std::vector<Walked> walked_;                   // parts
  int64_t n_pages_ = 0;                          // of all of these
  int64_t filter_count_ = 0, filter_pages_ = 0;  // see RowFilter::OfPart
  std::vector<Absent> absent_;
  std::optional<DistanceQuery> exact_;  // or, of codes in place of vectors:
  std::vector<float> disk_table_;
  std::vector<float> table_;
  CandidateList near_;                   // of all nodes
  std::vector<CandidateList> of_parts_;  // the nearest of each part, where there are several
  NodeSet met_;                          // nodes that were looked at
  NodeDistances listed_;                 // those that a list has had
  NodeSet read_;                         // pages that have arrived
  Nearest nearest_;
  // Where a filter allows some rows alone:
  CandidateList allowed_;  // of nodes that it allows
  CandidateList wide_;     // of all nodes again, for a query that is far from those
  bool is_far_ = false, is_wide_done_ = false;
  bool is_near_done_ = false;  // the list of all nodes is done
  int64_t n_allowed_ = 0;      // candidates since the entry points that are allowed
  int64_t n_led_to_ = 0;       // with the estimates that were made: all since then
  int64_t unchanged_ =
      0;  // pages since the k nearest were others, or since the list of all nodes was done
  std::vector<Candidate>
      beside_;  // neighbours of such nodes that it does not allow: a heap, the nearest on top
  int64_t looked_through_ = 0;  // pages up to this one, for a node that it allows
  int64_t spent_ = 0;           // pages that were asked for, of codes, too
  int64_t allowed_pages_asked_ = 0;
  std::vector<int64_t> under_way_;
  struct CodePage {
    int64_t page;
    bool asked;
    bool is_beside_allowed;  // the node whose neighbours they are is one that the filter allows
    std::vector<uint32_t> nodes;  // whose codes it has
  };
  std::vector<CodePage> code_pages_;  // that neighbours wait for
  WalkCosts costs_;
  std::vector<const uint8_t*> rows_, fresh_codes_;  // scratch
  std::vector<uint32_t> fresh_;
  std::vector<float> distance_;
  std::vector<float> estimate_;
};

}  // namespace espnx::graph
