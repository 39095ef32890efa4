// Threads that send, chain, wait, cancel and look at the same time, on a clock that the wall moves
// fast, and one that closes it at the end. Arguments: a seed, how many transfers a thread sends.
// What ends does so after what it comes after, and every byte is counted once.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "device/link_clock.hpp"
#include "io/failure.hpp"

using espnx::device::Leg;
using espnx::device::LinkClock;
using espnx::device::LinkTicket;

namespace {

constexpr int kThreads = 6, kLinks = 7, kLanes = 5;

void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

double end_of(LinkClock& clock, const LinkTicket& ticket) {
  const auto ended =
      clock.wait({ticket}, std::nullopt, LinkClock::Wall::now() + std::chrono::minutes(5),
                 LinkClock::kNobody, [] { return false; });
  if (!ended) fail("a deadline of minutes has passed");
  return *ended;
}

void send(LinkClock& clock, unsigned seed, int n_transfers, std::atomic<int64_t>& sent_bytes) {
  std::mt19937 random(seed);
  LinkTicket before;
  double before_s = 0;
  for (int i = 0; i < n_transfers; ++i) {
    const auto size_bytes = static_cast<int64_t>(random() % 5000);
    const auto amount = static_cast<double>(size_bytes);
    std::vector<Leg> path{{static_cast<int64_t>(random() % (kLinks - 1)), amount, 1e6},
                          {kLinks - 1, amount, 5e6}};
    std::vector<LinkTicket> after;
    if (before) after.push_back(before);
    const auto lane = static_cast<int64_t>(random() % kLanes);
    const LinkTicket ticket = clock.transfer(std::move(path), lane, size_bytes, random() % 3 * 1e-4,
                                             after, LinkClock::kNobody);
    if (random() % 8 == 0) {  // of which nothing else comes after
      const LinkTicket unwanted =
          clock.transfer({{0, 0, 1}}, lane, 0, 0, {ticket}, LinkClock::kNobody);
      clock.cancel(unwanted);
      try {
        if (end_of(clock, unwanted) < end_of(clock, ticket))
          fail("it has ended before what it comes after");
      } catch (const espnx::io::FailureError& error) {
        if (error.failure.kind != espnx::io::Kind::cancelled) throw;  // it had not ended yet
      }
    }
    sent_bytes += size_bytes;
    if (random() % 3 == 0) {
      clock.done(ticket);
      clock.times();
      clock.traffic();
    }
    if (random() % 2 == 0) {
      const double ended_s = end_of(clock, ticket);
      if (ended_s < before_s) fail("it has ended before what it comes after");
      before_s = ended_s;
    }
    before = ticket;
  }
  end_of(clock, before);
}

void wait_for_closing(LinkClock& clock, const LinkTicket& never) {
  try {
    end_of(clock, never);
    fail("what takes forever has ended");
  } catch (const espnx::io::FailureError& error) {
    if (error.failure.kind != espnx::io::Kind::closed) throw;
  }
}

// Members of a clock without a wall, on links that all of them share: where each one's work has
// ended.
std::vector<double> ends_of_members(unsigned seed, int n_transfers) {
  LinkClock clock({{"shared", 1e-5}, {"own", 0}}, kThreads, 0);
  const int64_t first = clock.join();
  std::vector<int64_t> members;
  for (int i = 0; i < kThreads; ++i) members.push_back(clock.join());
  std::vector<double> ended_s(kThreads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937 random(seed + i);
      for (int n = 0; n < n_transfers; ++n) {
        const auto bytes = static_cast<int64_t>(random() % 5000);
        const auto amount = static_cast<double>(bytes);
        const LinkTicket ticket =
            clock.transfer({{0, amount, 1e6}, {1, amount, 3e6}}, static_cast<int64_t>(random() % 3),
                           bytes, 1e-5, {}, members[i]);
        const auto until = LinkClock::Wall::now() + std::chrono::minutes(5);
        ended_s[i] = *clock.wait({ticket}, std::nullopt, until, members[i], [] { return false; });
      }
      clock.leave(members[i]);
    });
  }
  clock.leave(first);
  for (std::thread& thread : threads) thread.join();
  if (clock.at_work() != 0) fail("somebody is still at work");
  return ended_s;
}

}  // namespace

int main(int, char** words) {
  std::vector<espnx::device::Link> links(kLinks + 1);
  for (int i = 0; i <= kLinks; ++i) links[i] = {"link " + std::to_string(i), i % 2 * 1e-4};
  LinkClock clock(links, kLanes + 1, 0.05);
  std::atomic<int64_t> sent_bytes{0};
  const LinkTicket never =
      clock.transfer({{kLinks, 1, 1e-9}}, kLanes, 1, 0, {}, LinkClock::kNobody);
  std::thread last(wait_for_closing, std::ref(clock), std::cref(never));
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      send(clock, std::atoi(words[1]) * kThreads + i, std::atoi(words[2]), sent_bytes);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto passed = static_cast<int64_t>(clock.traffic()[kLinks - 1].amount + 0.5);
  if (passed != sent_bytes) fail("bytes were lost, or counted twice");
  clock.close();
  last.join();
  const auto seed = static_cast<unsigned>(std::atoi(words[1]));
  const std::vector<double> wanted = ends_of_members(seed, 40);
  for (int run = 0; run < 5; ++run) {
    if (ends_of_members(seed, 40) != wanted) fail("times depend on which thread runs first");
  }
  return 0;
}
