// Searches posting lists on storage for many queries: the reads of several queries run ahead of the
// scan of one, each query's lists in one plan.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cpu/postings/scan.hpp"
#include "io/engine.hpp"

namespace espnx::postings {

// A segment that is open: its lists in a file of an engine, what a scan needs of it in memory of
// the caller's.
struct OpenSegment {
  SegmentView view;
  int64_t file = 0;
  int64_t begin_bytes = 0, size_bytes = 0;  // of the lists in the file
  std::string name;                         // for messages
};

// A list that a query wants.
struct WantedList {
  int32_t segment;
  uint32_t term;
  int64_t offset_bytes,
      size_bytes;  // in the segment's lists; size_bytes may be that of the first layer alone
  int64_t first_layer_bytes;
  bool is_prefix;
  double weight, absent;
  Bytes name;
  bool is_digest;
};

struct SearchRequest {
  std::vector<OpenSegment> segments;
  std::vector<WantedList>
      lists;  // by query, by segment, in the order in which the terms are summed
  std::vector<int64_t> first_list;  // of each query, and the end
  std::vector<float> constants;     // of each query: added to every score
  int64_t k = 10;
  int threads = 1;
  double deadline_s = 30;  // of each query's reads
};

struct SearchCosts {
  int64_t requests = 0, bytes_asked = 0, bytes_moved = 0;
};

// The best records of one query, and what they cost. A list of another term with the same hash is
// left out, and named: its query is to be asked again without it.
struct QueryResult {
  std::vector<Hit> hits;
  SearchCosts costs;
  std::vector<int64_t> other_terms;  // places in `lists`
};

// Throws FailureError: the first failure of a read, a damaged list, the deadline, `interrupted`
// (asked about twenty times a second, by the calling thread alone).
std::vector<QueryResult> search(io::Engine& engine, const SearchRequest& request,
                                const std::function<bool()>& interrupted);

// One query whose lists are read while its caller does something else.
class Ticket {
 public:
  Ticket(std::shared_ptr<io::Engine> engine, SearchRequest request);
  ~Ticket();

  // The best by the first `lists` lists alone; all of them: the result.
  QueryResult result(int64_t lists, const std::function<bool()>& interrupted);
  // Whoever waits for its lists, or will, fails, unless all of them have arrived. From any thread.
  void cancel();
  int64_t lists() const { return static_cast<int64_t>(request_.lists.size()); }
  bool in_own_process() const { return engine_->in_own_process(); }

 private:
  std::shared_ptr<io::Engine> engine_;
  SearchRequest request_;
  std::shared_ptr<io::Transfer> transfer_;
  std::vector<bool> has_arrived_;
};

}  // namespace espnx::postings
