// See link_clock.hpp.
#include "link_clock.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "io/failure.hpp"

namespace espnx::device {

namespace {

constexpr int64_t kLanesMax = int64_t{1} << 24;
constexpr double kInstant =
    1e-18;  // work that takes less takes none: near 0 doubles could tell the moments apart
constexpr double kRounded = 1 - 1e-9;  // sums of rounded times stay below what they bound
constexpr std::chrono::milliseconds kSignalCheck{50};  // Ctrl-C is seen at least this often
constexpr std::chrono::microseconds kTick{50};         // events that lie closer are walked together
constexpr size_t kSpansMax = 4096;                     // more are folded from the front

std::atomic<int64_t> next_id{0};

io::FailureError failure(io::Kind kind, const std::string& what) {
  io::Failure failure;
  failure.kind = kind;
  failure.what = what;
  return io::FailureError(failure);
}

io::FailureError cancelled() {
  return failure(io::Kind::cancelled, "the emulated transfer was cancelled");
}

}  // namespace

void Spans::add(double begin, double end) {
  begin = std::max(begin, folded_end_);
  if (!(begin < end)) return;
  auto next = spans_.upper_bound(begin);
  if (next != spans_.begin() && std::prev(next)->second >= begin) {
    --next;
    begin = next->first;
  }
  while (next != spans_.end() && next->first <= end) {
    end = std::max(end, next->second);
    next = spans_.erase(next);
  }
  spans_.emplace_hint(next, begin, end);
  if (spans_.size() > kSpansMax) {
    const auto [first_begin, first_end] = *spans_.begin();
    folded_ += first_end - first_begin;
    folded_end_ = first_end;
    spans_.erase(spans_.begin());
  }
}

double Spans::total() const {
  double sum = folded_;
  for (const auto& [begin, end] : spans_) sum += end - begin;
  return sum;
}

// Ties go by the members, and by the order of each one's calls, so that a run is the same every
// time.
bool LinkClock::Event::operator>(const Event& other) const {
  return std::tie(at_s, member, number, kind) >
         std::tie(other.at_s, other.member, other.number, other.kind);
}

LinkClock::LinkClock(std::vector<Link> links, int64_t n_lanes, double stretch)
    : id_(next_id++), links_(std::move(links)), stretch_(stretch) {
  if (!(stretch >= 0) || !std::isfinite(stretch))
    throw failure(io::Kind::invalid, "stretch must be 0 or more");
  if (n_lanes < 0 || n_lanes > kLanesMax)
    throw failure(io::Kind::invalid, "lanes must be 0 to 16777216");
  for (const Link& link : links_) {
    if (!(link.latency_s >= 0) || !std::isfinite(link.latency_s)) {
      throw failure(io::Kind::invalid, "the latency of " + link.name + " must be 0 or more");
    }
    traffic_.push_back({link.name, 0, 0, 0});
  }
  lanes_.resize(n_lanes);
  is_near_lane_.resize(n_lanes), is_open_.resize(n_lanes), rate_.resize(n_lanes);
  users_.resize(links_.size()), is_near_link_.resize(links_.size());
  free_.resize(links_.size()), demand_.resize(links_.size()), n_open_.resize(links_.size());
}

LinkClock::~LinkClock() {
  // One after the other: a long line of followers, each with the next in its hands, would be freed
  // by as deep a recursion.
  for (const auto& [transfer, ticket] : live_) transfer->followers.clear();
}

class LinkClock::Place {
 public:
  Place(LinkClock& clock, Waiter& waiter) : clock_(clock), waiter_(waiter) {
    clock_.waiters_.push_back(&waiter_);
    if (clock_.leader_ != nullptr)
      clock_.leader_->woken.notify_one();  // this one may be due before the others
  }
  ~Place() {
    auto& waiters = clock_.waiters_;
    waiters.erase(std::find(waiters.begin(), waiters.end(), &waiter_));
    if (waiter_.member != kNobody && !waiter_.is_at_work) clock_.set_at_work(waiter_.member, true);
    hand_over();
  }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  // If it leads, another one does from now on.
  void hand_over() {
    if (clock_.leader_ != &waiter_) return;
    clock_.leader_ = nullptr;
    for (Waiter* other : clock_.waiters_) {
      if (other == &waiter_) continue;
      clock_.leader_ = other;
      other->woken.notify_one();
      return;
    }
  }

 private:
  LinkClock& clock_;
  Waiter& waiter_;
};

double LinkClock::clock() const {
  if (stretch_ == 0) return walked_s_;
  // Never behind what has been walked, whatever rounding does.
  return std::max(walked_s_,
                  std::chrono::duration<double>(Wall::now() - start_).count() / stretch_);
}

LinkClock::Wall::time_point LinkClock::wall(double at_s) const {
  const double ahead_s = std::min(at_s * stretch_, 1e9);
  return start_ + std::chrono::nanoseconds(static_cast<int64_t>(std::ceil(ahead_s * 1e9)));
}

// Before this, nothing that is waited for can be done.
LinkClock::Wall::time_point LinkClock::next_due() const {
  double first_s = std::numeric_limits<double>::infinity();
  for (const Waiter* waiter : waiters_) {
    if (waiter->next < waiter->tickets->size()) {
      first_s = std::min(first_s, (*waiter->tickets)[waiter->next]->not_before_s);
    }
  }
  return std::max(wall(std::max(first_s, events_.empty() ? 0 : events_.top().at_s)),
                  Wall::now() + kTick);
}

void LinkClock::wake_all() {
  for (Waiter* waiter : waiters_) waiter->woken.notify_one();
}

double LinkClock::now() {
  std::lock_guard lock(mutex_);
  return clock();
}

LinkTicket LinkClock::transfer(std::vector<Leg> path, int64_t lane, int64_t size_bytes,
                               double before_s, const std::vector<LinkTicket>& after,
                               int64_t member) {
  if (size_bytes < 0 || path.empty() || !(before_s >= 0) || !std::isfinite(before_s) || lane < 0 ||
      lane >= static_cast<int64_t>(lanes_.size())) {
    throw failure(io::Kind::invalid,
                  "a transfer needs a path, a lane, and a size and a time before of 0 or more");
  }
  auto made = std::make_shared<LinkTransfer>();
  for (const Leg& leg : path) {
    if (leg.link < 0 || leg.link >= static_cast<int64_t>(links_.size())) {
      throw failure(io::Kind::invalid, "there is no link " + std::to_string(leg.link));
    }
    if (!(leg.amount >= 0) || !(leg.per_s > 0) || !std::isfinite(leg.amount) ||
        !std::isfinite(leg.per_s)) {
      throw failure(io::Kind::invalid,
                    "work on " + links_[leg.link].name + " must be 0 or more, its rate above 0");
    }
    made->after_s += links_[leg.link].latency_s;
    made->alone_s = std::max(made->alone_s, leg.amount / leg.per_s);
  }
  made->clock = id_, made->path = std::move(path), made->lane = lane, made->before_s = before_s;
  made->units = made->left = size_bytes > 0 ? static_cast<double>(size_bytes) : 1;

  std::lock_guard lock(mutex_);
  if (is_closed_) throw failure(io::Kind::closed, "the topology is closed");
  if (member != kNobody) check_member(member);
  made->member = member, made->number = next_number_++;
  made->earliest_s = clock();
  if (stretch_ > 0) walk(made->earliest_s);
  made->not_before_s = made->earliest_s;
  for (const LinkTicket& each : after) {
    check(each);
    if (each->is_cancelled) throw cancelled();
    made->not_before_s =
        std::max(made->not_before_s, each->is_done ? each->end_s : each->not_before_s);
    made->earliest_s = std::max(made->earliest_s, each->is_done ? each->end_s : 0);
  }
  made->not_before_s += made->before_s + made->alone_s + made->after_s;
  live_.emplace(made.get(), made);
  for (const LinkTicket& each : after) {
    if (each->is_done) continue;
    each->followers.push_back(made);
    ++made->n_before;
  }
  if (made->n_before == 0) begin(*made);
  return made;
}

void LinkClock::check(const LinkTicket& ticket) const {
  if (!ticket || ticket->clock != id_)
    throw failure(io::Kind::invalid, "the ticket is of another topology");
}

void LinkClock::check_member(int64_t member) const {
  if (members_.count(member) == 0)
    throw failure(io::Kind::invalid, "whoever asks does not take part in this topology");
}

void LinkClock::begin(LinkTransfer& transfer) {
  const double at_s = transfer.earliest_s + transfer.before_s;
  events_.push({at_s, transfer.member, transfer.number, Kind::begins, &transfer, 0, 0});
}

bool LinkClock::is_stale(const Event& event) const {
  return event.kind == Kind::flowed && event.version != lanes_[event.lane].version;
}

void LinkClock::drop_stale() {
  while (!events_.empty() && is_stale(events_.top())) events_.pop();
}

void LinkClock::walk(double to_s) {
  for (drop_stale(); !events_.empty() && events_.top().at_s <= to_s; drop_stale()) step();
  walked_s_ = std::max(walked_s_, to_s);
}

// All that happens at the next moment at which something does, and then the rates that follow from
// it.
void LinkClock::step() {
  const double at_s = std::max(walked_s_, events_.top().at_s);
  walked_s_ = at_s;
  while (!events_.empty() && events_.top().at_s <= at_s) {
    const Event event = events_.top();
    events_.pop();
    if (!is_stale(event)) handle(event);
    if (events_.empty() || events_.top().at_s > at_s)
      share(at_s);  // which may make it another event of this moment
  }
  drop_stale();
}

void LinkClock::handle(const Event& event) {
  switch (event.kind) {
    case Kind::begins: enter(*event.transfer, event.at_s); break;
    case Kind::flowed: flow_on(event.lane, event.at_s); break;
    case Kind::ends: finish(*event.transfer, event.at_s); break;
  }
}

void LinkClock::enter(LinkTransfer& transfer, double at_s) {
  if (transfer.is_cancelled) {
    live_.erase(&transfer);
    return;
  }
  Lane& lane = lanes_[transfer.lane];
  lane.free_s = std::max(lane.free_s, at_s) + transfer.alone_s;
  transfer.not_before_s =
      std::max(transfer.not_before_s, lane.free_s * kRounded + transfer.after_s);
  lane.line.push_back(&transfer);
  if (lane.line.size() == 1) start(lane, at_s);
}

// The first in line begins to flow.
void LinkClock::start(Lane& lane, double at_s) {
  LinkTransfer& first = *lane.line.front();
  first.since_s = at_s;
  changed_.push_back(first.lane);
  for (const Leg& leg : first.path) {
    if (leg.amount > 0) users_[leg.link].push_back(first.lane);
  }
}

// The first in line has flowed, and the next one does.
void LinkClock::flow_on(int64_t number, double at_s) {
  Lane& lane = lanes_[number];
  LinkTransfer& first = *lane.line.front();
  lane.line.pop_front();
  ++lane.version;
  for (const Leg& leg : first.path) {
    traffic_[leg.link].amount += leg.amount;
    traffic_[leg.link].busy_s += leg.amount / leg.per_s;
    ++traffic_[leg.link].transfers;
    if (!(leg.amount > 0)) continue;
    auto& users = users_[leg.link];
    users.erase(std::find(users.begin(), users.end(), number));
    changed_links_.push_back(leg.link);
  }
  events_.push({at_s + first.after_s, first.member, first.number, Kind::ends, &first, 0, 0});
  if (!lane.line.empty()) start(lane, at_s);
}

// New rates for whoever shares a link, by way of others perhaps, with what has begun to flow or has
// flowed.
void LinkClock::share(double at_s) {
  if (changed_.empty() && changed_links_.empty()) return;
  collect();
  fill();
  for (const int64_t number : near_lanes_) {
    Lane& lane = lanes_[number];
    LinkTransfer& first = *lane.line.front();
    if (first.per_s != rate_[number]) {
      first.left = std::max(0.0, first.left - first.per_s * (at_s - first.since_s));
      first.since_s = at_s;
      first.per_s = rate_[number];
      const double flows_s = first.left / first.per_s,
                   ends_s = flows_s < kInstant ? at_s : at_s + flows_s;
      events_.push(
          {ends_s, first.member, first.number, Kind::flowed, nullptr, number, ++lane.version});
    }
    is_near_lane_[number] = 0;
  }
  for (const int64_t link : near_links_) is_near_link_[link] = 0;
}

// The lanes and links that one can come to from those that have changed.
void LinkClock::collect() {
  near_lanes_.clear(), near_links_.clear();
  const auto meet_link = [&](int64_t link) {
    if (!std::exchange(is_near_link_[link], 1)) near_links_.push_back(link);
  };
  const auto meet_lane = [&](int64_t lane) {
    if (!std::exchange(is_near_lane_[lane], 1)) near_lanes_.push_back(lane);
  };
  for (const int64_t link : changed_links_) meet_link(link);
  for (const int64_t lane : changed_) {
    if (!lanes_[lane].line.empty()) meet_lane(lane);
  }
  changed_.clear(), changed_links_.clear();
  size_t links = 0, lanes = 0;
  while (links < near_links_.size() || lanes < near_lanes_.size()) {
    for (; lanes < near_lanes_.size(); ++lanes) {
      for (const Leg& leg : lanes_[near_lanes_[lanes]].line.front()->path) {
        if (leg.amount > 0) meet_link(leg.link);
      }
    }
    for (; links < near_links_.size(); ++links) {
      for (const int64_t lane : users_[near_links_[links]]) meet_lane(lane);
    }
  }
  // Sums depend on the order in which they are made, and that must not depend on the order of
  // events.
  std::sort(near_lanes_.begin(), near_lanes_.end());
  std::sort(near_links_.begin(), near_links_.end());
}

// Max-min fair rates: all grow alike until a link is full; whoever has work there stays at that,
// the others grow on.
void LinkClock::fill() {
  for (const int64_t link : near_links_) free_[link] = 1, demand_[link] = 0, n_open_[link] = 0;
  size_t n_open = 0;
  for (const int64_t number : near_lanes_) {
    const LinkTransfer& first = *lanes_[number].line.front();
    bool is_held = false;
    for (const Leg& leg : first.path) {
      if (!(leg.amount > 0)) continue;
      demand_[leg.link] += first.cost_s(leg), ++n_open_[leg.link], is_held = true;
    }
    is_open_[number] = is_held;
    rate_[number] = std::numeric_limits<double>::max();  // of what has no work anywhere
    n_open += is_held;
  }
  while (n_open > 0) {
    int64_t full = -1;
    double level = std::numeric_limits<double>::infinity();
    for (const int64_t link : near_links_) {
      if (n_open_[link] == 0) continue;
      const double at = demand_[link] > 0 ? std::max(0.0, free_[link]) / demand_[link]
                                          : std::numeric_limits<double>::max();
      if (full < 0 || at < level) full = link, level = at;
    }
    level =
        std::clamp(level, std::numeric_limits<double>::min(), std::numeric_limits<double>::max());
    for (const int64_t number : users_[full]) {
      if (!std::exchange(is_open_[number], 0)) continue;
      --n_open;
      rate_[number] = level;
      const LinkTransfer& first = *lanes_[number].line.front();
      for (const Leg& leg : first.path) {
        if (!(leg.amount > 0)) continue;
        free_[leg.link] -= level * first.cost_s(leg), demand_[leg.link] -= first.cost_s(leg),
            --n_open_[leg.link];
      }
    }
  }
}

void LinkClock::finish(LinkTransfer& transfer, double at_s) {
  transfer.is_done = !transfer.is_cancelled;
  transfer.end_s = at_s;
  for (const LinkTicket& next : std::exchange(transfer.followers, {})) {
    next->earliest_s = std::max(next->earliest_s, at_s);
    if (--next->n_before == 0 && !next->is_cancelled) begin(*next);
  }
  for (Waiter* waiter : waiters_) {
    if (waiter->next < waiter->tickets->size() &&
        (*waiter->tickets)[waiter->next].get() == &transfer) {
      catch_up(*waiter);
    }
  }
  live_.erase(&transfer);
}

// Past what has ended. Where that is all, the waiter is at work from this moment on, however late
// its thread wakes.
void LinkClock::catch_up(Waiter& waiter) {
  const auto& tickets = *waiter.tickets;
  while (waiter.next < tickets.size() && tickets[waiter.next]->is_done) ++waiter.next;
  if (waiter.next < tickets.size() && !tickets[waiter.next]->is_cancelled) return;
  if (waiter.member != kNobody && !std::exchange(waiter.is_at_work, true))
    set_at_work(waiter.member, true);
  waiter.woken.notify_one();
}

std::optional<double> LinkClock::wait(const std::vector<LinkTicket>& tickets,
                                      std::optional<double> asked_s, Wall::time_point until,
                                      int64_t member, const std::function<bool()>& interrupted) {
  for (const LinkTicket& ticket : tickets) check(ticket);
  std::unique_lock lock(mutex_);
  if (member != kNobody) {
    check_member(member);
    set_at_work(member, false);
  }
  Waiter self{&tickets, member, 0, false, {}};
  Place place(*this, self);
  const double asked = std::min(asked_s.value_or(clock()), clock());
  auto check_at = Wall::now() + kSignalCheck;
  if (stretch_ > 0) walk(clock());
  for (catch_up(self); self.next < tickets.size(); catch_up(self)) {
    const bool is_late = Wall::now() >= until, is_cancelled = tickets[self.next]->is_cancelled;
    if (is_cancelled || is_closed_ || is_late) {
      waiting_.add(asked, clock());
      if (is_cancelled) throw cancelled();
      if (is_closed_) throw failure(io::Kind::closed, "the topology was closed");
      return std::nullopt;
    }
    if (stretch_ > 0) {
      if (leader_ == nullptr) leader_ = &self;
      self.woken.wait_until(lock,
                            std::min({leader_ == &self ? next_due() : until, until, check_at}));
      walk(clock());
    } else if (n_at_work_ == 0) {
      step();  // there is an event: what has not ended is on its way, or comes after something that
               // is
    } else {
      self.woken.wait_until(lock, std::min(until, check_at));
    }
    if (Wall::now() < check_at) continue;
    place.hand_over();  // asking may take a while
    lock.unlock();
    const bool is_interrupted = interrupted();
    lock.lock();
    if (is_interrupted) throw cancelled();
    check_at = Wall::now() + kSignalCheck;
  }
  double end_s = tickets.empty() ? asked : 0;
  for (const LinkTicket& ticket : tickets) end_s = std::max(end_s, ticket->end_s);
  waiting_.add(asked, clock());
  late_.add(std::max(asked, end_s), clock());
  return end_s;
}

bool LinkClock::done(const LinkTicket& ticket) {
  check(ticket);
  std::lock_guard lock(mutex_);
  if (stretch_ > 0 || n_at_work_ == 0) walk(clock());
  if (ticket->is_cancelled) throw cancelled();
  return ticket->is_done;
}

void LinkClock::cancel(const LinkTicket& ticket) {
  check(ticket);
  std::lock_guard lock(mutex_);
  if (stretch_ > 0 || n_at_work_ == 0) walk(clock());
  std::vector<LinkTicket> line{ticket};
  while (!line.empty()) {
    const LinkTicket each = std::move(line.back());
    line.pop_back();
    if (each->is_done || each->is_cancelled) continue;
    each->is_cancelled = true;
    line.insert(line.end(), each->followers.begin(), each->followers.end());
    if (each->n_before > 0) live_.erase(each.get());  // no event knows it
  }
  wake_all();
}

void LinkClock::advance(double to_s) {
  std::lock_guard lock(mutex_);
  if (stretch_ > 0)
    throw failure(io::Kind::invalid, "the wall clock moves this topology (stretch above 0)");
  if (!std::isfinite(to_s)) throw failure(io::Kind::invalid, "a time must be finite");
  walk(to_s);
}

int64_t LinkClock::join() {
  std::lock_guard lock(mutex_);
  members_.emplace(next_member_, true);
  ++n_at_work_;
  return next_member_++;
}

void LinkClock::rest(int64_t member) {
  std::lock_guard lock(mutex_);
  check_member(member);
  set_at_work(member, false);
}

void LinkClock::resume(int64_t member) {
  std::lock_guard lock(mutex_);
  check_member(member);
  set_at_work(member, true);
}

void LinkClock::leave(int64_t member) {
  std::lock_guard lock(mutex_);
  check_member(member);
  set_at_work(member, false);
  members_.erase(member);
}

int64_t LinkClock::at_work() {
  std::lock_guard lock(mutex_);
  return n_at_work_;
}

void LinkClock::set_at_work(int64_t member, bool is_at_work) {
  const auto found = members_.find(member);
  if (found == members_.end() || found->second == is_at_work) return;
  found->second = is_at_work;
  n_at_work_ += is_at_work ? 1 : -1;
  if (n_at_work_ == 0) wake_all();  // one of them moves the clock
}

LinkTimes LinkClock::times() {
  std::lock_guard lock(mutex_);
  return {clock(), std::max(0.0, waiting_.total() - late_.total()), late_.total()};
}

std::vector<LinkTraffic> LinkClock::traffic() {
  std::lock_guard lock(mutex_);
  if (stretch_ > 0 || n_at_work_ == 0) walk(clock());
  std::vector<LinkTraffic> found = traffic_;
  for (const Lane& lane : lanes_) {
    if (lane.line.empty()) continue;
    const LinkTransfer& first = *lane.line.front();
    const double left = std::max(0.0, first.left - first.per_s * (clock() - first.since_s));
    for (const Leg& leg : first.path) {
      const double share = 1 - left / first.units;
      found[leg.link].amount += share * leg.amount;
      found[leg.link].busy_s += share * (leg.amount / leg.per_s);
    }
  }
  return found;
}

void LinkClock::close() {
  std::lock_guard lock(mutex_);
  is_closed_ = true;
  wake_all();
}

}  // namespace espnx::device
