// Virtual time of emulated devices: links that work passes in turn, and a clock that the wall paces. What is computed
// and moved is real; when it counts as done is what the links say.
//
// A transfer passes its path in chunks, and each link takes chunks in the order in which they arrive at that link.
// Events are walked in the order of their virtual times, so a link is never reserved for work that has not arrived yet:
// doing that in the order of the calls makes early work wait behind late work, and under-reports throughput by a third.
//
// Times are logical: an event has the time that the links give it, however late anybody looks. So there is no thread
// here: whoever asks walks what is due, and lateness does not add up.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <queue>
#include <string>
#include <unordered_map>
#include <vector>

namespace espnx::device {

// What takes work one piece after the other: a wire, flash, memory, a compute unit.
struct Link {
  std::string name;
  double latency_s = 0;  // passes between the end of a chunk's work here and its arrival at the next link
};

// The work of a transfer on one link, at the rate that it is done with there. Bytes on a wire, FLOPs in a compute unit.
struct Leg {
  int64_t link = 0;
  double amount = 0;
  double per_s = 0;
};

struct LinkTraffic {
  std::string name;
  double amount = 0;  // that has passed it
  double busy_s = 0;
  int64_t transfers = 0;  // of which all has passed it
};

// Seconds of virtual time.
struct LinkTimes {
  double now_s = 0;
  double waited_s = 0;  // during which somebody waited, and nobody for something that the links had done already
  double late_s = 0;    // during which somebody did
};

// Spans of time, and how long they are together where each moment counts once.
class Spans {
 public:
  void add(double begin, double end);
  double total() const;

 private:
  std::map<double, double> spans_;  // disjoint, by their begin
  double folded_ = 0, folded_end_ = 0;
};

struct LinkTransfer;
using LinkTicket = std::shared_ptr<LinkTransfer>;

// A clock's own; whoever has a ticket gives it back. The clock's mutex guards what changes.
struct LinkTransfer {
  int64_t clock, number, size_bytes, chunk_bytes, n_chunks;
  std::vector<Leg> path;
  int64_t n_before = 0;     // of what it comes after: how many have not ended
  double earliest_s = 0;    // it does not begin before
  double at_least_s = 0;    // what it takes where nothing is in its way
  double not_before_s = 0;  // it does not end before
  double first_s = 0;       // when the first link has done the chunks that were sent on
  int64_t n_left = 0;       // chunks that have not arrived at the end
  bool is_done = false, is_cancelled = false;
  double end_s = 0;
  std::vector<LinkTicket> followers;

  double share(int64_t leg, int64_t chunk) const;  // of the leg's amount
  double service_s(int64_t leg, int64_t chunk) const { return share(leg, chunk) / path[leg].per_s; }
};

// Every call by any thread at any time. Throws io::FailureError.
class LinkClock {
 public:
  using Wall = std::chrono::steady_clock;

  // `stretch`: how many seconds of the wall clock a virtual second takes. 0: the wall has no part in it, and the clock
  // stands wherever waiting or advance() has moved it.
  LinkClock(std::vector<Link> links, double stretch);
  ~LinkClock();

  // Work that begins now, or when all of `after` has ended if that is later. It is cut by its bytes; each chunk has its
  // share of every leg.
  LinkTicket transfer(std::vector<Leg> path, int64_t size_bytes, int64_t chunk_bytes,
                      const std::vector<LinkTicket>& after);

  // When the last of them ended, as soon as that is now; nothing: `until` came first. `asked_s`: when the caller began
  // to need them, if that was before this call. Who needs several asks for them together: one that has ended early is
  // not late while another is waited for. `interrupted` is asked every now and then, in the caller's thread.
  std::optional<double> wait(const std::vector<LinkTicket>& tickets, std::optional<double> asked_s,
                             Wall::time_point until, const std::function<bool()>& interrupted);
  bool done(const LinkTicket& ticket);

  // Whoever waits for it is woken and told; so is what comes after it. What is in line at a link still passes.
  void cancel(const LinkTicket& ticket);

  double now();
  void advance(double to_s);  // where the wall has no part in it alone

  LinkTimes times();
  std::vector<LinkTraffic> traffic();

  // Wakes whoever waits. What has ended can still be asked for.
  void close();

 private:
  struct Waiter {
    LinkTransfer* transfer;
    std::condition_variable woken;
  };
  class Place;  // of a waiter among the others

  struct Event {  // a chunk has passed the legs before `leg`
    double at_s;
    int64_t number, chunk;
    int64_t leg;
    LinkTransfer* transfer;
    bool operator>(const Event& other) const;
  };

  // All under mutex_.
  double clock() const;
  void walk(double to_s);
  void step();
  void handle(const Event& event);
  void begin(LinkTransfer& transfer, double at_s);
  void pass_first(LinkTransfer& transfer, int64_t chunk);
  void finish(LinkTransfer& transfer, double at_s);
  void push(double at_s, LinkTransfer& transfer, int64_t chunk, int64_t leg);
  void check(const LinkTicket& ticket) const;
  Wall::time_point wall(double at_s) const;
  Wall::time_point next_due() const;
  void wake_all();

  const int64_t id_;
  const std::vector<Link> links_;
  const double stretch_;
  const Wall::time_point start_ = Wall::now();
  std::mutex mutex_;
  std::vector<Waiter*> waiters_;
  Waiter* leader_ = nullptr;  // walks what is due for all of them, which sleep until theirs is done
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::unordered_map<LinkTransfer*, LinkTicket> live_;  // what has not ended
  std::vector<double> free_s_;                          // when each link has done all that has arrived
  std::vector<LinkTraffic> traffic_;
  Spans waiting_, late_;  // the second is part of the first
  double walked_s_ = 0;   // everything before has happened
  int64_t next_number_ = 0;
  bool is_closed_ = false;
};

}  // namespace espnx::device
