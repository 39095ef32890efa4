// Attention's C++ interface on random problems, against sums in double precision: rows in blocks a
// stride apart, positions, windows, merging. Every array ends where its memory ends, so a read or
// write beyond a row is fatal. Run by tests/ops/attention/test_native.py.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "cpu/attention/attention.hpp"
#include "cpu/cpu_level.hpp"

using namespace espnx;
std::mt19937 random_bits(7);
int64_t below(int64_t n) { return static_cast<int64_t>(random_bits() % static_cast<uint32_t>(n)); }
float normal() {
  static std::normal_distribution<float> of;
  return of(random_bits);
}

// One random problem: fp32 or int8 rows, small enough for a plain loop.
struct Problem {
  int64_t n, d, dv, n_rows, block_rows, stride, first_position;
  bool is_x, is_int8;
  std::vector<float> q;
  std::unique_ptr<uint8_t[]> bytes;  // ends with the last row
  std::vector<int64_t> last, first;
  std::vector<uint8_t> visible;
  int64_t k_begin, v_begin, k_scales, v_scales;

  Problem() {
    n = 1 + below(40), d = 8 * (1 + below(below(4) ? 9 : 40)), n_rows = 1 + below(300),
    block_rows = 1 + below(70);
    is_x = below(4) == 0, is_int8 = !is_x && below(3) == 0;
    dv = is_x ? d : 8 * (1 + below(20));
    const int64_t item = is_int8 ? 1 : 4, k_bytes = block_rows * d * item;
    k_begin = is_int8 ? 4 * d : 0, k_scales = -k_begin, v_scales = k_bytes;
    v_begin = is_x ? k_begin : k_begin + k_bytes + (is_int8 ? 4 * block_rows : 0);
    const int64_t gap = below(5), blocks = (n_rows + block_rows - 1) / block_rows,
                  whole = v_begin + block_rows * dv * item;
    stride = whole + gap;
    const int64_t in_last = n_rows - (blocks - 1) * block_rows;
    const int64_t size = (blocks - 1) * stride + v_begin + in_last * dv * item;
    bytes.reset(new uint8_t[size]);
    for (int64_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(below(256));
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t rows = b + 1 < blocks ? block_rows : in_last;
      uint8_t* block = bytes.get() + b * stride;
      if (is_int8) fill(block, d), fill(block + k_begin + v_scales, rows);
      if (!is_int8) fill(block + k_begin, (is_x ? rows : block_rows) * d);
      if (!is_int8 && !is_x) fill(block + v_begin, rows * dv);
    }
    for (int64_t i = 0; i < n * d; ++i) q.push_back(normal() / std::sqrt(static_cast<float>(d)));
    first_position = below(3) ? below(1000) : 0;
    if (below(2))
      for (int64_t i = 0; i < n; ++i) last.push_back(first_position + below(n_rows + 20) - 10);
    if (below(2))
      for (int64_t i = 0; i < n; ++i)
        first.push_back(below(9) ? first_position + below(n_rows + 20) - 10 : INT64_MIN);
    if (!last.empty()) last[0] = INT64_MAX;
    if (below(2))
      for (int64_t i = 0; i < n_rows; ++i) visible.push_back(below(3) ? 1 : 0);
    for (size_t r = 0; r < visible.size(); ++r)
      if (!visible[r]) spoil(static_cast<int64_t>(r));
  }
  // Bytes of 0xFF, which are NaNs, where nobody is to look.
  void spoil(int64_t row) {
    uint8_t* block = bytes.get() + row / block_rows * stride;
    const int64_t r = row % block_rows, item = is_int8 ? 1 : 4;
    std::memset(block + k_begin + r * d * item, 0xFF, d * item);
    std::memset(block + v_begin + r * dv * item, 0xFF, dv * item);
    if (is_int8) std::memset(block + k_begin + v_scales + 4 * r, 0xFF, 4);
  }
  void fill(uint8_t* to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const float value = is_int8 ? normal() / 100 : normal();
      std::memcpy(to + 4 * i, &value, 4);
    }
  }
  AttentionQueries queries() const {
    return {q.data(),
            n,
            d,
            dv,
            last.empty() ? nullptr : last.data(),
            first.empty() ? nullptr : first.data()};
  }
  // From block `block` on, `count` rows.
  AttentionRows rows(int64_t block, int64_t count) const {
    const uint8_t* k = bytes.get() + block * stride + k_begin;
    const int64_t begin = block * block_rows;
    return {k,
            k + v_begin - k_begin,
            count,
            block_rows,
            stride,
            is_int8 ? RowFormat::int8 : RowFormat::fp32,
            k_scales,
            v_scales,
            first_position + begin,
            visible.empty() ? nullptr : visible.data() + begin};
  }
  double value(int64_t row, int64_t column, bool of_v) const {
    const uint8_t* block = bytes.get() + row / block_rows * stride;
    const int64_t r = row % block_rows, at = (of_v ? v_begin : k_begin) +
                                             (r * (of_v ? dv : d) + column) * (is_int8 ? 1 : 4);
    float scale = 1;
    if (!is_int8) return std::memcpy(&scale, block + at, 4), scale;
    std::memcpy(&scale, block + (of_v ? k_begin + v_scales + 4 * r : 4 * column), 4);
    return static_cast<double>(scale) * static_cast<int8_t>(block[at]);
  }
  bool sees(int64_t i, int64_t row) const {
    const int64_t position = first_position + row;
    return (last.empty() || position <= last[i]) && (first.empty() || position >= first[i]) &&
           (visible.empty() || visible[row]);
  }
};

struct State {
  std::vector<float> o, m, l;
  State(const Problem& p) : o(p.n * p.dv, 0.0f), m(p.n, -INFINITY), l(p.n, 0.0f) {}
  AttentionState view() { return {o.data(), m.data(), l.data()}; }
};

void fail(const char* what, double got, double expected, double bound) {
  std::printf("%s: got %g, expected %g within %g\n", what, got, expected, bound);
  std::exit(3);
}

// docs/tolerances.md derives the bound.
void check(const Problem& p, State& state) {
  const double u = std::ldexp(1.0, -24);
  std::vector<float> lse(p.n);
  finish_attention(state.view(), p.n, p.dv, lse.data());
  for (int64_t i = 0; i < p.n; ++i) {
    std::vector<double> score(p.n_rows, -INFINITY);
    double peak = -INFINITY, magnitude = 0, total = 0;
    for (int64_t r = 0; r < p.n_rows; ++r) {
      if (!p.sees(i, r)) continue;
      double sum = 0, absolute = 0;
      for (int64_t k = 0; k < p.d; ++k) {
        const double product = p.q[i * p.d + k] * p.value(r, k, false);
        sum += product, absolute += std::fabs(product);
      }
      score[r] = sum, peak = std::max(peak, sum), magnitude = std::max(magnitude, absolute);
    }
    for (double s : score) total += peak > -INFINITY ? std::exp(s - peak) : 0;
    const double e =
        std::expm1((p.d + 12) * u * 1.01 * magnitude) + (p.n_rows + 6 * 12 + 12) * u * 1.01;
    const double expected_lse = total > 0 ? peak + std::log(total) : -INFINITY,
                 bound = e + 2 * u * (1 + std::fabs(expected_lse));
    if (!(lse[i] == expected_lse || std::fabs(lse[i] - expected_lse) <= bound))
      fail("lse", lse[i], expected_lse, bound);
    for (int64_t c = 0; c < p.dv; ++c) {
      double sum = 0, absolute = 0;
      for (int64_t r = 0; r < p.n_rows && total > 0; ++r) {
        if (!p.sees(i, r)) continue;
        const double v = p.value(r, c, true), weight = std::exp(score[r] - peak) / total;
        sum += weight * v, absolute += weight * std::fabs(v);
      }
      const double got = state.o[i * p.dv + c], limit = 2 * e / (1 - e) * absolute + 1e-35;
      if (!(std::fabs(got - sum) <= limit)) fail("o", got, sum, limit);
    }
  }
}

int main(int, char** argv) {
  const int rounds = std::atoi(argv[1]);
  for (int level = 0; level <= 2 && set_cpu_level(level); ++level) {
    for (int round = 0; round < rounds; ++round) {
      const Problem p;
      State whole(p), cut(p), rest(p), scattered(p);
      attend(p.queries(), p.rows(0, p.n_rows), whole.view());
      // The same in two calls, and in two states that are merged.
      const int64_t blocks = (p.n_rows + p.block_rows - 1) / p.block_rows, at = below(blocks + 1);
      const int64_t first_rows = std::min(at * p.block_rows, p.n_rows);
      attend(p.queries(), p.rows(0, first_rows), cut.view());
      if (first_rows < p.n_rows)
        attend(p.queries(), p.rows(at, p.n_rows - first_rows),
               round % 2 ? cut.view() : rest.view());
      if (round % 2 == 0) merge_attention(cut.view(), rest.view(), p.n, p.dv);
      std::vector<int64_t> offsets;
      for (int64_t b = 0; b < blocks; ++b) offsets.push_back(b * p.stride);
      attend_scattered(p.queries(), p.rows(0, p.n_rows), offsets.data(), scattered.view());
      if (scattered.o != whole.o || scattered.l != whole.l) fail("scattered", 0, 0, 0);
      check(p, whole);
      check(p, cut);
    }
  }
  std::puts("done");
}
