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

constexpr std::chrono::milliseconds kSignalCheck{50};  // Ctrl-C is seen at least this often
constexpr std::chrono::microseconds kTick{50};         // events that lie closer are walked together
constexpr size_t kSpansMax = 4096;                     // more are folded from the front
constexpr int64_t kChunksMax = int64_t{1} << 24;

std::atomic<int64_t> next_id{0};

io::FailureError failure(io::Kind kind, const std::string& what) {
  io::Failure failure;
  failure.kind = kind;
  failure.what = what;
  return io::FailureError(failure);
}

io::FailureError cancelled() { return failure(io::Kind::cancelled, "the emulated transfer was cancelled"); }

}  // namespace

double LinkTransfer::share(int64_t leg, int64_t chunk) const {
  if (size_bytes == 0) return path[leg].amount;
  const int64_t bytes = std::min(chunk_bytes, size_bytes - chunk * chunk_bytes);
  return static_cast<double>(bytes) * (path[leg].amount / static_cast<double>(size_bytes));
}

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

// Ties go by the order of the calls, so that a run is the same every time.
bool LinkClock::Event::operator>(const Event& other) const {
  return std::tie(at_s, number, chunk, leg) > std::tie(other.at_s, other.number, other.chunk, other.leg);
}

LinkClock::LinkClock(std::vector<Link> links, double stretch)
    : id_(next_id++), links_(std::move(links)), stretch_(stretch), free_s_(links_.size(), 0) {
  if (!(stretch >= 0) || !std::isfinite(stretch)) throw failure(io::Kind::invalid, "stretch must be 0 or more");
  for (const Link& link : links_) {
    if (!(link.latency_s >= 0) || !std::isfinite(link.latency_s)) {
      throw failure(io::Kind::invalid, "the latency of " + link.name + " must be 0 or more");
    }
    traffic_.push_back({link.name, 0, 0, 0});
  }
}

LinkClock::~LinkClock() {
  // One after the other: a long line of followers, each with the next in its hands, would be freed by as deep a
  // recursion.
  for (const auto& [transfer, ticket] : live_) transfer->followers.clear();
}

class LinkClock::Place {
 public:
  Place(LinkClock& clock, Waiter& waiter) : clock_(clock), waiter_(waiter) {
    clock_.waiters_.push_back(&waiter_);
    if (clock_.leader_ != nullptr) clock_.leader_->woken.notify_one();  // this one may be due before the others
  }
  ~Place() {
    auto& waiters = clock_.waiters_;
    waiters.erase(std::find(waiters.begin(), waiters.end(), &waiter_));
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
  return std::max(walked_s_, std::chrono::duration<double>(Wall::now() - start_).count() / stretch_);
}

LinkClock::Wall::time_point LinkClock::wall(double at_s) const {
  const double ahead_s = std::min(at_s * stretch_, 1e9);
  return start_ + std::chrono::nanoseconds(static_cast<int64_t>(std::ceil(ahead_s * 1e9)));
}

// Before this, nothing that is waited for can be done.
LinkClock::Wall::time_point LinkClock::next_due() const {
  double first_s = std::numeric_limits<double>::infinity();
  for (const Waiter* waiter : waiters_) first_s = std::min(first_s, waiter->transfer->not_before_s);
  return std::max(wall(std::max(first_s, events_.empty() ? 0 : events_.top().at_s)), Wall::now() + kTick);
}

void LinkClock::wake_all() {
  for (Waiter* waiter : waiters_) waiter->woken.notify_one();
}

double LinkClock::now() {
  std::lock_guard lock(mutex_);
  return clock();
}

void LinkClock::push(double at_s, LinkTransfer& transfer, int64_t chunk, int64_t leg) {
  events_.push({at_s, transfer.number, chunk, leg, &transfer});
}

LinkTicket LinkClock::transfer(std::vector<Leg> path, int64_t size_bytes, int64_t chunk_bytes,
                               const std::vector<LinkTicket>& after) {
  if (size_bytes < 0 || chunk_bytes < 1 || size_bytes / chunk_bytes >= kChunksMax || path.empty()) {
    throw failure(io::Kind::invalid, "a transfer needs a path, a size of 0 or more bytes and chunks of 1 or more");
  }
  for (const Leg& leg : path) {
    if (leg.link < 0 || leg.link >= static_cast<int64_t>(links_.size())) {
      throw failure(io::Kind::invalid, "there is no link " + std::to_string(leg.link));
    }
    if (!(leg.amount >= 0) || !(leg.per_s > 0) || !std::isfinite(leg.amount) || !std::isfinite(leg.per_s)) {
      throw failure(io::Kind::invalid, "work on " + links_[leg.link].name + " must be 0 or more, its rate above 0");
    }
  }
  auto made = std::make_shared<LinkTransfer>();
  made->clock = id_, made->path = std::move(path);
  made->size_bytes = size_bytes, made->chunk_bytes = chunk_bytes;
  made->n_chunks = made->n_left = std::max<int64_t>(1, (size_bytes + chunk_bytes - 1) / chunk_bytes);
  for (size_t leg = 0; leg < made->path.size(); ++leg) {
    made->at_least_s += links_[made->path[leg].link].latency_s;
    made->at_least_s +=
        leg == 0 ? made->path[0].amount / made->path[0].per_s : made->service_s(leg, made->n_chunks - 1);
  }

  std::lock_guard lock(mutex_);
  if (is_closed_) throw failure(io::Kind::closed, "the topology is closed");
  made->earliest_s = clock();
  walk(made->earliest_s);
  made->not_before_s = made->earliest_s;
  for (const LinkTicket& each : after) {
    check(each);
    if (each->is_cancelled) throw cancelled();
    made->not_before_s = std::max(made->not_before_s, each->is_done ? each->end_s : each->not_before_s);
    made->earliest_s = std::max(made->earliest_s, each->is_done ? each->end_s : 0);
  }
  made->not_before_s += made->at_least_s;
  made->number = next_number_++;
  live_.emplace(made.get(), made);
  for (const LinkTicket& each : after) {
    if (each->is_done) continue;
    each->followers.push_back(made);
    ++made->n_before;
  }
  if (made->n_before == 0) push(made->earliest_s, *made, 0, 0);
  return made;
}

void LinkClock::check(const LinkTicket& ticket) const {
  if (!ticket || ticket->clock != id_) throw failure(io::Kind::invalid, "the ticket is of another topology");
}

void LinkClock::walk(double to_s) {
  while (!events_.empty() && events_.top().at_s <= to_s) step();
  walked_s_ = std::max(walked_s_, to_s);
}

void LinkClock::step() {
  const Event event = events_.top();
  events_.pop();
  walked_s_ = std::max(walked_s_, event.at_s);
  handle(event);
}

void LinkClock::handle(const Event& event) {
  LinkTransfer& transfer = *event.transfer;
  if (event.leg == 0) {
    begin(transfer, event.at_s);
    return;
  }
  LinkTraffic& passed = traffic_[transfer.path[event.leg - 1].link];
  passed.amount += transfer.share(event.leg - 1, event.chunk);
  passed.busy_s += transfer.service_s(event.leg - 1, event.chunk);
  if (event.chunk + 1 == transfer.n_chunks) ++passed.transfers;
  if (event.leg == 1 && event.chunk + 1 < transfer.n_chunks) pass_first(transfer, event.chunk + 1);
  if (event.leg == static_cast<int64_t>(transfer.path.size())) {
    if (--transfer.n_left == 0) finish(transfer, event.at_s);
    return;
  }
  const int64_t link = transfer.path[event.leg].link;
  free_s_[link] = std::max(free_s_[link], event.at_s) + transfer.service_s(event.leg, event.chunk);
  push(free_s_[link] + links_[link].latency_s, transfer, event.chunk, event.leg + 1);
}

// All chunks stand in line at the first link from now on; the events of one follow from those of the one before it, so
// that the heap does not hold them all.
void LinkClock::begin(LinkTransfer& transfer, double at_s) {
  if (transfer.is_cancelled) {
    live_.erase(&transfer);
    return;
  }
  double& free_s = free_s_[transfer.path[0].link];
  transfer.first_s = free_s = std::max(free_s, at_s);
  transfer.not_before_s = std::max(transfer.not_before_s, free_s + transfer.at_least_s);
  for (int64_t chunk = 0; chunk < transfer.n_chunks; ++chunk) free_s += transfer.service_s(0, chunk);
  pass_first(transfer, 0);
}

void LinkClock::pass_first(LinkTransfer& transfer, int64_t chunk) {
  transfer.first_s += transfer.service_s(0, chunk);
  push(transfer.first_s + links_[transfer.path[0].link].latency_s, transfer, chunk, 1);
}

void LinkClock::finish(LinkTransfer& transfer, double at_s) {
  transfer.is_done = !transfer.is_cancelled;
  transfer.end_s = at_s;
  for (const LinkTicket& next : std::exchange(transfer.followers, {})) {
    next->earliest_s = std::max(next->earliest_s, at_s);
    if (--next->n_before == 0 && !next->is_cancelled) push(next->earliest_s, *next, 0, 0);
  }
  for (Waiter* waiter : waiters_) {
    if (waiter->transfer == &transfer) waiter->woken.notify_one();
  }
  live_.erase(&transfer);
}

std::optional<double> LinkClock::wait(const std::vector<LinkTicket>& tickets, std::optional<double> asked_s,
                                      Wall::time_point until, const std::function<bool()>& interrupted) {
  for (const LinkTicket& ticket : tickets) check(ticket);
  std::unique_lock lock(mutex_);
  Waiter self{nullptr, {}};
  Place place(*this, self);
  const double asked = std::min(asked_s.value_or(clock()), clock());
  auto check_at = Wall::now() + kSignalCheck;
  double end_s = tickets.empty() ? asked : 0;
  for (size_t next = 0; next < tickets.size();) {
    LinkTransfer& transfer = *tickets[next];
    self.transfer = &transfer;
    if (stretch_ > 0) walk(clock());
    if (transfer.is_done) {
      end_s = std::max(end_s, transfer.end_s);
      ++next;
      continue;
    }
    const bool is_late = Wall::now() >= until;
    if (transfer.is_cancelled || is_closed_ || is_late) {
      waiting_.add(asked, clock());
      if (transfer.is_cancelled) throw cancelled();
      if (is_closed_) throw failure(io::Kind::closed, "the topology was closed");
      return std::nullopt;
    }
    if (stretch_ == 0) {
      step();  // there is an event: what has not ended is on its way, or comes after something that is
    } else {
      if (leader_ == nullptr) leader_ = &self;
      self.woken.wait_until(lock, std::min({leader_ == &self ? next_due() : until, until, check_at}));
    }
    if (Wall::now() < check_at) continue;
    place.hand_over();  // asking may take a while
    lock.unlock();
    const bool is_interrupted = interrupted();
    lock.lock();
    if (is_interrupted) throw cancelled();
    check_at = Wall::now() + kSignalCheck;
  }
  waiting_.add(asked, clock());
  late_.add(std::max(asked, end_s), clock());
  return end_s;
}

bool LinkClock::done(const LinkTicket& ticket) {
  check(ticket);
  std::lock_guard lock(mutex_);
  walk(clock());
  if (ticket->is_cancelled) throw cancelled();
  return ticket->is_done;
}

void LinkClock::cancel(const LinkTicket& ticket) {
  check(ticket);
  std::lock_guard lock(mutex_);
  walk(clock());
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
  if (stretch_ > 0) throw failure(io::Kind::invalid, "the wall clock moves this topology (stretch above 0)");
  if (!std::isfinite(to_s)) throw failure(io::Kind::invalid, "a time must be finite");
  walk(to_s);
}

LinkTimes LinkClock::times() {
  std::lock_guard lock(mutex_);
  return {clock(), std::max(0.0, waiting_.total() - late_.total()), late_.total()};
}

std::vector<LinkTraffic> LinkClock::traffic() {
  std::lock_guard lock(mutex_);
  walk(clock());
  return traffic_;
}

void LinkClock::close() {
  std::lock_guard lock(mutex_);
  is_closed_ = true;
  wake_all();
}

}  // namespace espnx::device
