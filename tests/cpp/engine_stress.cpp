// Many threads, one engine, every kind of trouble; built with the thread or the address sanitizer
// by tests/cpp/test_engine_stress.py.
//
//   engine_stress PATH SEED ROUNDS FOLDER
//
// PATH: uring, posix, memory, hostile (the thread pool behind HostileQueue), or pressure (uring
// over a kernel that refuses, again and again, and for long).
//
// The bytes of the files follow from their offsets, so each reader checks what it gets. Exit code
// 0: every transfer ended in the right bytes or in a failure that may happen, and nothing was left
// behind.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include "cpu/crc32c.hpp"
#include "hostile_queue.hpp"
#include "io/engine.hpp"

namespace espnx::io {

// The linker's --wrap: who calls the one comes by the other.
std::unique_ptr<Queue> make_real_posix_queue(unsigned threads) __asm__(
    "__real__ZN5espnx2io16make_posix_queueEj");
std::unique_ptr<Queue> make_stressed_queue(unsigned threads) __asm__(
    "__wrap__ZN5espnx2io16make_posix_queueEj");
extern "C" long real_syscall(long number, ...) noexcept __asm__("__real_syscall");
extern "C" long engine_syscall(long number, ...) noexcept __asm__("__wrap_syscall");

std::atomic<bool> g_hostile{false}, g_pressure{false};
std::atomic<int> g_refusals{
    0};  // calls that will be refused; the longest run is more than any loop should count
std::atomic<uint64_t> g_seed{1};

// A kernel without memory for requests.
extern "C" long engine_syscall(long number, ...) noexcept {
  va_list list;
  va_start(list, number);
  long arg[6];
  for (long& each : arg) each = va_arg(list, long);
  va_end(list);
  if (g_pressure && number == SYS_io_uring_enter) {
    thread_local std::mt19937_64 random(g_seed++);
    if (random() % 8 == 0)
      g_refusals += static_cast<int>(random() % 400 == 0 ? 1500 : random() % 4);
    if (g_refusals > 0) {
      --g_refusals;
      errno = std::array<int, 4>{EAGAIN, EBUSY, ENOMEM, EINTR}[random() % 4];
      return -1;
    }
    const auto asked = static_cast<unsigned>(arg[1]);
    if (asked > 1 && random() % 4 == 0) {  // takes some of them, and then does not wait
      arg[1] = 1 + static_cast<long>(random() % asked);
      arg[2] = arg[1] == static_cast<long>(asked) ? arg[2] : 0;
    }
  }
  return real_syscall(number, arg[0], arg[1], arg[2], arg[3], arg[4], arg[5]);
}

std::unique_ptr<Queue> make_stressed_queue(unsigned threads) {
  auto real = make_real_posix_queue(threads);
  if (!g_hostile) return real;
  return std::make_unique<HostileQueue>(std::move(real), g_seed++);
}

}  // namespace espnx::io

namespace {

namespace io = espnx::io;
using Random = std::mt19937_64;

constexpr int64_t kFileBytes = 700'001;
constexpr int kFiles = 3;

[[noreturn]] void broken(const std::string& what) {
  std::fprintf(stderr, "engine_stress: %s\n", what.c_str());
  std::_Exit(3);
}

int64_t below(Random& random, int64_t limit) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
}

char byte_at(int64_t file, int64_t offset) {
  return static_cast<char>((offset * 2654435761LL + file * 97) >> 7);
}

std::string file_name(const std::string& folder, int64_t file) {
  return folder + "/stress" + std::to_string(file);
}

void make_files(const std::string& folder) {
  std::vector<char> data(kFileBytes);
  for (int64_t file = 0; file < kFiles; ++file) {
    for (int64_t i = 0; i < kFileBytes; ++i) data[i] = byte_at(file, i);
    const int fd = open(file_name(folder, file).c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (fd < 0 || write(fd, data.data(), data.size()) != kFileBytes) broken("cannot make files");
    close(fd);
  }
}

struct Outcomes {
  std::atomic<int64_t> whole{0}, closed{0}, cancelled{0}, late{0}, injected{0};
};

// A plan with the file each of its items is of (0 to kFiles - 1): engines number files as they
// like.
struct Case {
  io::TransferSpec spec;
  std::vector<int64_t> source;
};

Case random_case(Random& random, const std::vector<int64_t>& numbers) {
  Case result;
  io::TransferSpec& spec = result.spec;
  const int64_t count = below(random, 30);
  int64_t room = 0;
  const bool with_memory = below(random, 2) != 0, aligned = below(random, 2) != 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t file = below(random, kFiles);
    int64_t offset = below(random, kFileBytes);
    int64_t size = below(random, 3) == 0 ? below(random, 100'000) : below(random, 9'000);
    if (aligned) offset = offset / 4096 * 4096, size = size / 4096 * 4096;
    size = std::min(size, kFileBytes - offset);
    if (aligned) size = size / 4096 * 4096;
    result.source.push_back(file);
    spec.file.push_back(numbers[file]);
    spec.offset_bytes.push_back(offset);
    spec.size_bytes.push_back(size);
    if (with_memory) spec.out_offset_bytes.push_back(room);
    room += aligned ? size : size + below(random, 50);
    std::vector<char> data(size);
    for (int64_t b = 0; b < size; ++b) data[b] = byte_at(file, offset + b);
    spec.crc32c.push_back(espnx::crc32c(0, data.data(), data.size()));
  }
  if (below(random, 2) != 0) spec.crc32c.clear();
  if (with_memory && count > 0) {
    auto* memory = static_cast<char*>(std::aligned_alloc(4096, (room + 4096) / 4096 * 4096));
    spec.base = memory;
    spec.base_bytes = room;
    spec.keep_alive = std::shared_ptr<void>(memory, [](void* p) { std::free(p); });
  }
  spec.gap_bytes = below(random, 3) * 5000;
  spec.priority = static_cast<int>(below(random, 3));
  spec.deadline_s = below(random, 12) == 0 ? 0.0005 : 60;
  return result;
}

void check_items(const io::Transfer& transfer, const Case& wanted,
                 const std::vector<int64_t>& items, std::vector<char>& seen) {
  for (int64_t i : items) {
    if (seen[i]++) broken("an item was handed out twice");
    const int64_t size = wanted.spec.size_bytes[i];
    if (size == 0) continue;
    const char* data = transfer.memory() + transfer.position_bytes()[i];
    for (int64_t b = 0; b < size; ++b) {
      if (data[b] != byte_at(wanted.source[i], wanted.spec.offset_bytes[i] + b))
        broken("wrong bytes in item " + std::to_string(i));
    }
  }
}

void account(const io::Failure& failure, Outcomes& outcomes, bool closing) {
  switch (failure.kind) {
    case io::Kind::closed:
      if (!closing) broken("closed before its time: " + failure.what);
      ++outcomes.closed;
      return;
    case io::Kind::cancelled: ++outcomes.cancelled; return;
    case io::Kind::deadline: ++outcomes.late; return;
    case io::Kind::read:
    case io::Kind::short_read: ++outcomes.injected; return;
    default: broken("a failure that cannot be: " + failure.what + " " + failure.path);
  }
}

// One reader's work: a plan at a time, sometimes two, read item by item, sometimes given up half
// way.
void reader(io::Engine& engine, const std::vector<int64_t>& numbers, uint64_t seed, int rounds,
            Outcomes& outcomes, const std::atomic<bool>& closing) {
  Random random(seed);
  for (int round = 0; round < rounds; ++round) {
    Case wanted = random_case(random, numbers);
    try {
      const auto transfer = engine.submit(wanted.spec);
      if (below(random, 15) == 0) continue;  // nobody waits for it
      std::vector<char> seen(wanted.source.size());
      for (bool finished = false; !finished;) {
        std::vector<int64_t> items;
        finished = transfer->next(items, 1 + below(random, 40),
                                  below(random, 4) == 0 ? 100'000 : 2'000'000'000);
        check_items(*transfer, wanted, items, seen);
        if (below(random, 40) == 0) {
          io::Failure failure;
          failure.kind = io::Kind::cancelled;
          transfer->fail(failure);
        }
      }
      if (std::count(seen.begin(), seen.end(), 1) != static_cast<int64_t>(seen.size()))
        broken("an item was lost");
      ++outcomes.whole;
    } catch (const io::FailureError& error) {
      account(error.failure, outcomes, closing);
      if (error.failure.kind == io::Kind::closed) return;
    }
  }
}

io::EngineOptions options_for(const std::string& path, Random& random, bool faults) {
  io::EngineOptions options;
  options.path = path == "hostile" ? "posix" : path == "pressure" ? "uring" : path;
  options.queue_depth = static_cast<unsigned>(1 + below(random, 40));
  options.threads = static_cast<unsigned>(1 + below(random, 6));
  options.request_bytes = (1 + below(random, 16)) * 4096;
  options.pool_bytes = below(random, 2) * (4 << 20);
  options.poison = true;
  options.seed = random();
  if (faults) {
    io::FaultRule rule;
    rule.operation = "read";
    rule.probability = 0.01;
    options.rules = {rule, rule, rule, rule};
    options.rules[1].fault = io::Fault::delay;
    options.rules[1].value = 200'000;
    options.rules[2].fault = io::Fault::short_;
    options.rules[2].value = 5000;
    options.rules[3].value = EAGAIN;
  }
  return options;
}

// `close_at_ms` >= 0: two threads close the engine while the readers are at work.
void round_of(const std::string& path, const std::string& folder, uint64_t seed, int rounds,
              bool faults, int64_t close_at_ms, Outcomes& outcomes) {
  Random random(seed);
  io::Engine engine(options_for(path, random, faults));
  std::vector<int64_t> numbers;
  for (int64_t file = 0; file < kFiles; ++file) {
    numbers.push_back(engine.open(file_name(folder, file), io::Mode::read,
                                  below(random, 2) ? io::Direct::automatic : io::Direct::no));
  }
  std::atomic<bool> closing{false}, stop{false};
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < 3; ++i)
    threads.emplace_back(
        [&, i] { reader(engine, numbers, seed * 10 + i, rounds, outcomes, closing); });
  std::thread watcher([&] {
    while (!stop) {
      if (engine.stats().in_flight < 0) broken("fewer than no requests in flight");
      std::this_thread::yield();
    }
  });
  if (close_at_ms >= 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(close_at_ms));
    closing = true;
    std::thread other([&] { engine.close(5); });
    engine.close(5);
    other.join();
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  watcher.join();
  closing = true;
  engine.close(5);
  const io::EngineStats stats = engine.stats();
  if (stats.in_flight != 0 || stats.quarantined_buffers != 0 || stats.quarantined_bytes != 0)
    broken("something was left in flight");
}

// Engines that close at the same time with requests that never complete: both abandon memory.
void abandon_together(const std::string& path, const std::string& folder) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      Random random(i);
      io::EngineOptions options = options_for(path, random, false);
      options.queue_depth = 8;
      options.rules = {io::FaultRule()};
      options.rules[0].fault = io::Fault::never;
      options.rules[0].operation = "read";
      io::Engine engine(options);
      const int64_t file = engine.open(file_name(folder, 0), io::Mode::read, io::Direct::automatic);
      io::TransferSpec spec;
      spec.file = {file};
      spec.offset_bytes = {0};
      spec.size_bytes = {100'000};
      engine.submit(spec);
      while (engine.stats().in_flight == 0) std::this_thread::yield();
      engine.close(0.001);
      if (engine.stats().quarantined_buffers != 1)
        broken("an abandoned buffer was not counted once");
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Threads that wait for the same transfer: none may return before all of it is checked and copied.
void share_a_transfer(const std::string& path, const std::string& folder) {
  Random random(7);
  io::Engine engine(options_for(path, random, false));
  std::vector<int64_t> numbers = {
      engine.open(file_name(folder, 0), io::Mode::read, io::Direct::automatic)};
  for (int round = 0; round < 10; ++round) {
    io::TransferSpec spec;
    std::vector<char> memory(300'000);
    spec.base = memory.data();
    spec.base_bytes = 300'000;
    for (int64_t i = 0; i < 10; ++i) {
      spec.file.push_back(numbers[0]);
      spec.offset_bytes.push_back(i * 60'000 + 1);
      spec.size_bytes.push_back(30'000);
      spec.out_offset_bytes.push_back(i * 30'000);
    }
    const auto transfer = engine.submit(spec);
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&] {
        std::vector<int64_t> items;
        while (!transfer->next(items, 3, 5'000'000'000)) {
        }
        for (int64_t i = 0; i < 300'000; ++i) {
          if (memory[i] != byte_at(0, i / 30'000 * 60'000 + 1 + i % 30'000))
            broken("returned before the bytes were there");
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

// More requests than the ring has entries, while the kernel takes none: they wait, and all of them
// complete.
void fill_the_ring(const std::string& folder) {
  constexpr int kRequests = 300, kBytes = 512;
  std::string reason;
  const auto queue = io::make_uring_queue(1, reason);
  const auto file = io::open_file(file_name(folder, 0), io::Mode::read, io::Direct::no);
  std::vector<char> memory(kRequests * kBytes);
  io::g_refusals = 2500;
  for (int i = 0; i < kRequests; ++i) {
    queue->submit({io::Op::read, file.get(), i * 1000, memory.data() + i * kBytes, kBytes,
                   static_cast<uint64_t>(i)});
  }
  std::vector<int> seen(kRequests);
  std::vector<io::Completion> found;
  for (int count = 0; count < kRequests; count += static_cast<int>(found.size())) {
    found.clear();
    queue->wait(found, 1, 1'000'000'000);
    for (const io::Completion& completion : found) {
      if (completion.result != kBytes || seen[completion.tag]++)
        broken("a request of a full ring went wrong");
    }
  }
  for (int i = 0; i < kRequests * kBytes; ++i) {
    if (memory[i] != byte_at(0, i / kBytes * 1000 + i % kBytes))
      broken("wrong bytes from a full ring");
  }
}

void run(const std::string& path, const std::string& folder, uint64_t seed, int rounds,
         Outcomes& outcomes) {
  round_of(path, folder, seed, rounds, false, -1, outcomes);
  round_of(path, folder, seed + 1, rounds, true, -1, outcomes);
  for (int64_t ms : {0, 1, 3, 10})
    round_of(path, folder, seed + 2 + ms, 1000, ms % 2 != 0, ms, outcomes);
  abandon_together(path, folder);
  share_a_transfer(path, folder);
}

}  // namespace

int main(int count, char** words) {
  if (count != 5) broken("engine_stress PATH SEED ROUNDS FOLDER");
  const std::string path = words[1], folder = words[4];
  const uint64_t seed = std::strtoull(words[2], nullptr, 10);
  const int rounds = std::atoi(words[3]);
  io::g_hostile = path == "hostile";
  io::g_pressure = path == "pressure";
  make_files(folder);
  Outcomes outcomes;
  try {
    std::string reason;
    const bool is_ring = path == "uring" || path == "pressure";
    if (is_ring && !io::make_uring_queue(8, reason)) broken("uring cannot be had: " + reason);
    if (is_ring) fill_the_ring(folder);
    run(path, folder, seed, rounds, outcomes);
  } catch (const io::FailureError& error) {
    broken("failed: " + error.failure.what + " " + error.failure.path);
  }
  if (outcomes.whole == 0) broken("nothing was ever read");
  std::printf("%s: %lld whole, %lld closed, %lld cancelled, %lld late, %lld injected\n",
              path.c_str(), static_cast<long long>(outcomes.whole),
              static_cast<long long>(outcomes.closed), static_cast<long long>(outcomes.cancelled),
              static_cast<long long>(outcomes.late), static_cast<long long>(outcomes.injected));
  return 0;
}
