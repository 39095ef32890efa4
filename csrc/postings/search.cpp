// See search.hpp.
#include "search.hpp"

#include <algorithm>
#include <atomic>
#include <deque>
#include <exception>
#include <mutex>

#include "cpu/parallel.hpp"
#include "reads.hpp"

namespace espnx::postings {
namespace {

constexpr int64_t kSignalCheckNs = 50'000'000;
constexpr int64_t kQueriesAhead = 32;        // of a thread, whose lists are being read
constexpr int64_t kBytesAhead = 64ll << 20;  // of a thread; a query that wants more goes alone

io::Failure failure_of(io::Kind kind, std::string what) {
  io::Failure failure;
  failure.kind = kind;
  failure.what = std::move(what);
  return failure;
}

[[noreturn]] void interrupt() {
  throw io::FailureError(
      failure_of(io::Kind::cancelled, "searching posting lists was interrupted"));
}

[[noreturn]] void damaged(const SearchRequest& request, const WantedList& list,
                          const std::string& why) {
  const OpenSegment& segment = request.segments[list.segment];
  io::Failure failure =
      failure_of(io::Kind::checksum, "the posting list of a term is damaged: " + why);
  failure.path = segment.name;
  failure.offset_bytes = segment.begin_bytes + list.offset_bytes;
  failure.size_bytes = list.size_bytes;
  throw io::FailureError(failure);
}

// Null where there is nothing to read.
std::shared_ptr<io::Transfer> submit(io::Engine& engine, const SearchRequest& request,
                                     int64_t begin, int64_t end) {
  if (begin == end) return nullptr;
  io::TransferSpec spec;
  spec.deadline_s = request.deadline_s;
  for (int64_t i = begin; i < end; ++i) {
    const WantedList& list = request.lists[i];
    const OpenSegment& segment = request.segments[list.segment];
    spec.file.push_back(segment.file);
    spec.offset_bytes.push_back(segment.begin_bytes + list.offset_bytes);
    spec.size_bytes.push_back(list.size_bytes);
  }
  return engine.submit(std::move(spec));
}

void cancel(const std::shared_ptr<io::Transfer>& transfer) {
  if (!transfer) return;
  transfer->fail(failure_of(io::Kind::cancelled, "searching posting lists was interrupted"));
}

// Scans the lists [begin, end) of `request` that have arrived; `data(i)` is where list i lies.
QueryResult scan_query(const SearchRequest& request, int64_t query, int64_t begin, int64_t end,
                       Scanner& scanner, const std::function<const uint8_t*(int64_t)>& data) {
  QueryResult result;
  TopK best(request.k);
  std::vector<WeightedList> lists;
  std::vector<int64_t> places;
  for (int64_t i = begin; i < end;) {
    const int32_t number = request.lists[i].segment;
    const SegmentView& segment = request.segments[number].view;
    lists.clear(), places.clear();
    for (; i < end && request.lists[i].segment == number; ++i) {
      const WantedList& want = request.lists[i];
      const StoredList stored{
          want.term, {data(i), want.size_bytes}, want.first_layer_bytes, want.name, want.is_digest};
      const char* why = nullptr;
      switch (check_list(stored, segment.rules, want.is_prefix, &why)) {
        case ListFault::kDamaged: damaged(request, want, why);
        case ListFault::kOtherTerm: result.other_terms.push_back(i); continue;
        case ListFault::kNone: break;
      }
      lists.push_back({stored, want.weight, want.absent});
      places.push_back(i);
    }
    size_t bad = 0;
    if (!scanner.scan(segment, lists, request.constants[query], best, &bad)) {
      damaged(request, request.lists[places[bad]], "its record numbers are out of order");
    }
  }
  result.hits = best.take();
  return result;
}

SearchCosts costs_of(const io::Transfer& transfer) {
  return {transfer.request_count(), transfer.asked_bytes(), transfer.moved_bytes()};
}

// Kept for the thread's next search: making one takes as long as scanning a short query.
Scanner& own_scanner() {
  thread_local Scanner scanner;
  return scanner;
}

// A thread's queries: reads run ahead in the order in which they are scanned.
class Share {
 public:
  Share(io::Engine& engine, const SearchRequest& request, std::atomic<bool>& ends)
      : request_(request), ends_(ends), reads_(engine) {}

  void run(int64_t begin, int64_t end, const std::function<bool()>& interrupted,
           std::vector<QueryResult>& results) {
    auto asked = io::Clock::now();
    const std::function<bool()> stops = [&] {
      if (ends_) return true;
      const auto now = io::Clock::now();
      if (now - asked < std::chrono::nanoseconds(kSignalCheckNs)) return false;
      asked = now;
      return interrupted();
    };
    int64_t next = begin;
    for (int64_t query = begin; query < end; ++query) {
      if (stops()) interrupt();  // queries whose lists are there already do not wait
      if (static_cast<int64_t>(ahead_.size()) <=
          kQueriesAhead / 2) {  // many in one call of the kernel
        while (next < end && may_read(next)) start(next++);
      }
      const std::shared_ptr<ReadBatch> batch = ahead_.front();
      reads_.wait(*batch, request_.deadline_s, stops);
      const int64_t first = request_.first_list[query], last = request_.first_list[query + 1];
      results[query] = scan_query(request_, query, first, last, own_scanner(),
                                  [&](int64_t i) { return batch->data(i - first); });
      results[query].costs = {batch->requests, batch->bytes_asked, batch->bytes_moved};
      ahead_bytes_ -= batch->bytes_asked;
      ahead_.pop_front();
    }
  }

 private:
  bool may_read(int64_t query) const {
    int64_t bytes = 0;
    for (int64_t i = request_.first_list[query]; i < request_.first_list[query + 1]; ++i) {
      bytes += request_.lists[i].size_bytes;
    }
    return ahead_.empty() || (static_cast<int64_t>(ahead_.size()) < kQueriesAhead &&
                              ahead_bytes_ + bytes <= kBytesAhead);
  }

  void start(int64_t query) {
    std::vector<Want> wants;
    for (int64_t i = request_.first_list[query]; i < request_.first_list[query + 1]; ++i) {
      const WantedList& list = request_.lists[i];
      const OpenSegment& segment = request_.segments[list.segment];
      wants.push_back({segment.file, segment.begin_bytes + list.offset_bytes, list.size_bytes});
    }
    ahead_.push_back(reads_.start(wants));
    ahead_bytes_ += ahead_.back()->bytes_asked;
  }

  const SearchRequest& request_;
  std::atomic<bool>& ends_;
  std::deque<std::shared_ptr<ReadBatch>> ahead_;
  int64_t ahead_bytes_ = 0;
  Reads reads_;
};

}  // namespace

std::vector<QueryResult> search(io::Engine& engine, const SearchRequest& request,
                                const std::function<bool()>& interrupted) {
  const auto n = static_cast<int64_t>(request.constants.size());
  std::vector<QueryResult> results(n);
  std::atomic<bool> ends{false};
  std::mutex mutex;
  std::exception_ptr failure;
  const int64_t grain = std::max<int64_t>(1, (n + request.threads - 1) / request.threads);
  parallel_for(n, grain, request.threads, [&](int thread, int64_t begin, int64_t end) {
    const std::function<bool()> never = [] { return false; };
    try {
      Share(engine, request, ends).run(begin, end, thread == 0 ? interrupted : never, results);
    } catch (...) {
      std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
      ends = true;
    }
  });
  if (failure) std::rethrow_exception(failure);
  return results;
}

Ticket::Ticket(std::shared_ptr<io::Engine> engine, SearchRequest request)
    : engine_(std::move(engine)),
      request_(std::move(request)),
      has_arrived_(request_.lists.size()) {
  transfer_ = submit(*engine_, request_, 0, lists());
}

Ticket::~Ticket() { cancel(); }

void Ticket::cancel() { postings::cancel(transfer_); }

QueryResult Ticket::result(int64_t n_lists, const std::function<bool()>& interrupted) {
  std::vector<int64_t> items;
  while (std::find(has_arrived_.begin(), has_arrived_.begin() + n_lists, false) !=
         has_arrived_.begin() + n_lists) {
    items.clear();
    transfer_->next(items, 1, kSignalCheckNs);
    for (const int64_t item : items) has_arrived_[item] = true;
    if (interrupted()) interrupt();
  }
  QueryResult result = scan_query(request_, 0, 0, n_lists, own_scanner(), [&](int64_t i) {
    return reinterpret_cast<const uint8_t*>(transfer_->memory()) + transfer_->position_bytes()[i];
  });
  if (transfer_) result.costs = costs_of(*transfer_);
  return result;
}

}  // namespace espnx::postings
