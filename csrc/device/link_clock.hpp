// Virtual time of emulated devices: links that work passes, and a clock that the wall paces. What
// is computed and moved is real; when it counts as done is what the links say.
//
// A transfer flows through all links of its path at once (cut through), as fast as the slowest lets
// it. Transfers of one lane follow one another in the order in which they came to it; those at the
// front of their lanes share the links that they have in common max-min fairly: all get the same
// bytes a second, but for those that another link holds back, whose rest the others share. Rates
// change only when a transfer begins to flow or has flowed, so those are the events, and they are
// walked in the order of their virtual times.
//
// Times are logical: an event has the time that the links give it, however late anybody looks. So
// there is no thread here: whoever asks walks what is due, and lateness does not add up.
//
// Members are threads that ask one clock together, without a wall. It stands while one of them is
// at work: what it will ask for counts from the moment at which the clock stands, whichever thread
// the machine runs first.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
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

// What work passes: a wire, flash, memory, a compute unit.
struct Link {
  std::string name;
  double latency_s = 0;  // between what it sends and its arrival; takes no bandwidth
};

// The work of a transfer on one link, at the rate that it is done with there. Bytes on a wire,
// FLOPs in a compute unit.
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
  double waited_s =
      0;  // during which somebody waited, and nobody for something that the links had done already
  double late_s = 0;  // during which somebody did
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
  int64_t clock, member, number, lane;
  std::vector<Leg> path;
  double units = 1;      // in which links are shared: bytes, or 1 of what has none
  double before_s = 0;   // between its beginning and its place in the lane: what flash senses first
  double after_s = 0;    // latencies of the links
  double alone_s = 0;    // that it flows where nothing is in its way
  int64_t n_before = 0;  // of what it comes after: how many have not ended
  double earliest_s = 0;    // it does not begin before
  double not_before_s = 0;  // it does not end before
  double left = 0;          // units that have not flowed at since_s
  double per_s = 0, since_s = 0;
  bool is_done = false, is_cancelled = false;
  double end_s = 0;
  std::vector<LinkTicket> followers;

  // Of one unit, on one link.
  double cost_s(const Leg& leg) const { return leg.amount / leg.per_s / units; }
};

// Every call by any thread at any time. Throws io::FailureError.
class LinkClock {
 public:
  using Wall = std::chrono::steady_clock;
  static constexpr int64_t kNobody = -1;  // no member

  // `stretch`: how many seconds of the wall clock a virtual second takes. 0: the wall has no part
  // in it, and the clock stands wherever waiting or advance() has moved it.
  LinkClock(std::vector<Link> links, int64_t n_lanes, double stretch);
  ~LinkClock();

  // Work that begins now, or when all of `after` has ended if that is later. `before_s` passes
  // before it is in its lane. `size_bytes` of what flows through the path; 0: nothing of a size,
  // and each leg's amount is work all the same.
  LinkTicket transfer(std::vector<Leg> path, int64_t lane, int64_t size_bytes, double before_s,
                      const std::vector<LinkTicket>& after, int64_t member);

  // When the last of them ended, as soon as that is now; nothing: `until` came first. `asked_s`:
  // when the caller began to need them, if that was before this call. Who needs several asks for
  // them together: one that has ended early is not late while another is waited for. `interrupted`
  // is asked every now and then, in the caller's thread.
  std::optional<double> wait(const std::vector<LinkTicket>& tickets, std::optional<double> asked_s,
                             Wall::time_point until, int64_t member,
                             const std::function<bool()>& interrupted);
  bool done(const LinkTicket& ticket);

  // Whoever waits for it is woken and told; so is what comes after it. What is in line at a link
  // still passes.
  void cancel(const LinkTicket& ticket);

  double now();
  void advance(double to_s);  // where the wall has no part in it alone

  // A member that is at work from now on. Of what begins at the same moment, that of the member
  // that joined first goes first.
  int64_t join();
  void rest(int64_t member);  // it waits for another member, and not for this clock
  void resume(int64_t member);
  void leave(int64_t member);
  int64_t at_work();  // members that the clock stands for

  LinkTimes times();
  std::vector<LinkTraffic> traffic();

  // Wakes whoever waits. What has ended can still be asked for.
  void close();

 private:
  struct Waiter {
    const std::vector<LinkTicket>* tickets;
    int64_t member;
    size_t next = 0;  // the first that has not ended
    bool is_at_work = false;
    std::condition_variable woken;
  };
  class Place;  // of a waiter among the others

  enum class Kind { begins, flowed, ends };
  struct Event {
    double at_s;
    int64_t member, number;
    Kind kind;
    LinkTransfer* transfer;  // alive until it ends
    int64_t lane, version;   // of `flowed`, which counts unless the lane has moved on
    bool operator>(const Event& other) const;
  };

  struct Lane {
    std::deque<LinkTransfer*> line;  // the first one flows
    int64_t version = 0;
    double free_s = 0;  // not before: all in line at full speed
  };

  // All under mutex_.
  double clock() const;
  void walk(double to_s);
  void step();
  void handle(const Event& event);
  void begin(LinkTransfer& transfer);
  void enter(LinkTransfer& transfer, double at_s);
  void start(Lane& lane, double at_s);
  void flow_on(int64_t lane, double at_s);
  void finish(LinkTransfer& transfer, double at_s);
  void share(double at_s);
  void collect();
  void fill();
  void drop_stale();
  bool is_stale(const Event& event) const;
  void check(const LinkTicket& ticket) const;
  void check_member(int64_t member) const;
  void set_at_work(int64_t member, bool is_at_work);
  void catch_up(Waiter& waiter);
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
  std::vector<Lane> lanes_;
  std::vector<std::vector<int64_t>>
      users_;                         // of each link the lanes whose first one has work there
  std::vector<LinkTraffic> traffic_;  // of what has flowed
  std::unordered_map<int64_t, bool> members_;
  int64_t n_at_work_ = 0, next_member_ = 0;
  Spans waiting_, late_;  // the second is part of the first
  double walked_s_ = 0;   // everything before has happened
  int64_t next_number_ = 0;
  bool is_closed_ = false;

  // Of share(), kept so that it takes no memory each time.
  std::vector<int64_t> changed_, changed_links_, near_links_, near_lanes_;
  std::vector<char> is_near_link_, is_near_lane_, is_open_;
  std::vector<double> free_, demand_, rate_;
  std::vector<int64_t> n_open_;
};

}  // namespace espnx::device
