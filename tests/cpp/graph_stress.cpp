// A graph that several threads build, and that several threads search while reads fail, and
// somebody closes it; built with a sanitizer by tests/graph/test_stress.py.
//
//   graph_stress SEED ROUNDS FOLDER
//
// Exit code 0: every search found what the same search alone finds, or ended with the failure of a
// read, a deadline, or because the graph was closed.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "cpu/crc32c.hpp"
#include "graph/build/pack.hpp"
#include "graph/build/vamana.hpp"
#include "graph/search.hpp"

namespace {

namespace io = espnx::io;
namespace graph = espnx::graph;
using Random = std::mt19937_64;

constexpr int64_t kN = 700, kDim = 11, kDegree = 8, kQueries = 40, kK = 5, kPage = 4096, kSalt = 77;

[[noreturn]] void broken(const std::string& what) {
  std::fprintf(stderr, "graph_stress: %s\n", what.c_str());
  std::_Exit(3);
}

std::vector<uint8_t> random_bytes(int64_t count, Random& random) {
  std::vector<uint8_t> bytes(count);
  for (uint8_t& each : bytes) each = static_cast<uint8_t>(random());
  return bytes;
}

// A graph whose codes are the vectors themselves: each value is a part, each byte its own centroid.
graph::GraphView build(const std::vector<uint8_t>& vectors, const std::string& path) {
  const graph::VectorTable table{vectors.data(), kN, kDim, espnx::VectorFormat::kUint8};
  graph::VamanaOptions options;
  options.degree = kDegree, options.list_size = 20, options.threads = 3;
  graph::Vamana built(table, options);
  if (!built.build([](int64_t, int64_t) { return true; })) broken("the build ended early");
  built.connect({built.medoid()});
  graph::GraphView view;
  view.pages = {{path}};
  view.layout = {kN, kDim, espnx::VectorFormat::kUint8, kDegree, kDim, kDegree, kPage, 0, false};
  view.parts = {{0, kN, kSalt, 0, 1}};
  view.layout.nodes_per_page = (kPage - graph::kPageHeaderBytes) / view.layout.node_bytes();
  const auto order = graph::pack_nodes(built, table, view.layout.nodes_per_page);
  if (std::set<uint32_t>(order.begin(), order.end()).size() != kN) broken("packing lost a node");
  std::vector<uint32_t> node_of(kN);
  for (uint32_t i = 0; i < kN; ++i) node_of[order[i]] = i;
  std::vector<uint8_t> file(view.layout.pages_of(view.parts[0]) * kPage);
  for (uint32_t i = 0; i < kN; ++i) {
    uint8_t* page = file.data() + view.layout.page_of(i) * kPage;
    uint8_t* at =
        page + graph::kPageHeaderBytes + i % view.layout.nodes_per_page * view.layout.node_bytes();
    std::memcpy(at, table.row(order[i]), kDim);
    std::memcpy(at + kDim, &order[i], 4);
    const auto count = static_cast<uint16_t>(built.degree_of(order[i]));
    std::memcpy(at + kDim + 4, &count, 2);
    for (int64_t j = 0; j < count; ++j) {
      const uint32_t near = built.neighbours_of(order[i])[j];
      std::memcpy(at + kDim + 8 + 4 * j, &node_of[near], 4);
      std::memcpy(at + kDim + 8 + 4 * kDegree + j * kDim, table.row(near), kDim);
    }
  }
  for (int64_t page = 0; page < view.layout.pages_of(view.parts[0]); ++page) {
    uint8_t* at = file.data() + page * kPage;
    const auto number = static_cast<uint32_t>(page);
    const uint64_t salt = kSalt;
    std::memcpy(at + 4, &number, 4);
    std::memcpy(at + 8, &salt, 8);
    const uint32_t sum = espnx::crc32c(0, at + 4, kPage - 4);
    std::memcpy(at, &sum, 4);
  }
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (fd < 0 || write(fd, file.data(), file.size()) != static_cast<ssize_t>(file.size()))
    broken("cannot make files");
  close(fd);
  std::vector<int64_t> parts;
  for (int64_t k = 0; k <= kDim; ++k) parts.push_back(k);
  std::vector<float> centroids;
  for (int c = 0; c < 256; ++c) centroids.insert(centroids.end(), kDim, static_cast<float>(c));
  view.book = graph::Codebook(parts, centroids.data());
  view.entries = {node_of[built.medoid()]};
  view.entry_codes.assign(table.row(built.medoid()), table.row(built.medoid()) + kDim);
  return view;
}

struct Results {
  std::vector<int64_t> rows, pages, code_pages, measured, estimated;
  std::vector<float> distances, seconds;
};

Results search(graph::GraphSearcher& searcher, const std::vector<uint8_t>& queries, int64_t beam,
               double deadline_s) {
  const auto n = static_cast<int64_t>(queries.size()) / kDim;
  Results found{std::vector<int64_t>(n * kK), std::vector<int64_t>(n), std::vector<int64_t>(n),
                std::vector<int64_t>(n),      std::vector<int64_t>(n), std::vector<float>(n * kK),
                std::vector<float>(n)};
  const std::vector<float> wide(queries.begin(), queries.end());
  graph::SearchRequest request;
  request.walk.k = kK, request.walk.list_size = 15, request.walk.beam_width = beam;
  request.n_queries = n, request.queries = queries.data(), request.queries_f32 = wide.data();
  request.query_bytes = kDim, request.deadline_s = deadline_s;
  request.rows = found.rows.data(), request.distances = found.distances.data(),
  request.pages = found.pages.data(), request.code_pages = found.code_pages.data();
  request.measured = found.measured.data(), request.estimated = found.estimated.data();
  request.seconds = found.seconds.data();
  searcher.finish(searcher.start(request), [] { return false; });
  return found;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) broken("SEED ROUNDS FOLDER");
  Random random(std::strtoull(argv[1], nullptr, 10));
  const int rounds = std::atoi(argv[2]);
  const std::string path = std::string(argv[3]) + "/nodes.bin";
  const auto vectors = random_bytes(kN * kDim, random),
             queries = random_bytes(kQueries * kDim, random);
  const graph::GraphView view = build(vectors, path);
  graph::SearchOptions alone;
  alone.threads = 1, alone.walks = 1;
  graph::GraphSearcher first(view, alone);
  const Results expected = search(first, queries, 1, 60);
  for (int round = 0; round < rounds; ++round) {
    graph::SearchOptions options;
    options.threads = 1 + static_cast<int>(random() % 3),
    options.walks = 1 + static_cast<int64_t>(random() % 9);
    options.path = round % 3 == 0 ? "posix" : "auto";
    options.seed = random();
    if (round % 2 == 1) {
      options.rules.push_back({"read", "*", 0, INT64_MAX, 1, -1, 0.05, io::Fault::short_, 512});
      options.rules.push_back({"read", "*", 0, INT64_MAX, 1, -1, 0.002, io::Fault::error, 5});
      options.rules.push_back({"read", "*", 0, INT64_MAX, 1, -1, 0.002, io::Fault::flip, 99});
      options.rules.push_back({"read", "*", 0, INT64_MAX, 1, -1, 0.001, io::Fault::never, 0});
    }
    graph::GraphSearcher searcher(view, options);
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; ++caller) {
      callers.emplace_back([&, caller] {
        for (int turn = 0; turn < 4; ++turn) {
          try {
            const int64_t beam = caller == 0 ? 1 + turn : 1;
            // Where reads never end, the deadline is what each search waits for.
            const Results found = search(searcher, queries, beam, round % 2 == 1 ? 0.2 : 60);
            if (beam == 1 &&
                (found.rows != expected.rows || found.distances != expected.distances)) {
              broken("a search beside others finds something else");
            }
          } catch (const io::FailureError& error) {
            const io::Kind kind = error.failure.kind;
            if (kind != io::Kind::read && kind != io::Kind::checksum &&
                kind != io::Kind::deadline && kind != io::Kind::closed) {
              broken(error.failure.what);
            }
          }
        }
      });
    }
    if (round % 4 == 2) searcher.close();
    for (std::thread& each : callers) each.join();
  }
  return 0;
}
