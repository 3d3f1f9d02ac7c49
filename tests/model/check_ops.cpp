// Checks the compiled operations without Python, for processors that are only emulated here. Prints the path and "ok",
// or what is wrong. Includes the sources, because their structures are private.
#include "layer_ops.cpp"
#include "paged_attention.cpp"

#include <cstdio>
#include <cstdlib>

using skipjoin::Groups;

extern "C" {

int64_t skipjoin_strip_lanes();
int64_t skipjoin_strip_bytes(const Groups *groups);
void skipjoin_pack_groups(const Groups *groups, const uint8_t *codes, const uint8_t *scales, const uint8_t *minimums,
                          int64_t threads);
void skipjoin_group_rows(int64_t type, const Groups *groups, const int64_t *outputs, int64_t count, void *out,
                         int64_t threads);
void skipjoin_route(int64_t type, const void *logits, int64_t stride, int64_t rows, const skipjoin::Experts *call,
                    int64_t *chosen, float *shares, int64_t threads);
void skipjoin_experts(int64_t type, const skipjoin::Experts *call);
}

namespace {

constexpr int kThreads = 2;

[[noreturn]] void fail(const char *what, int64_t type, int64_t at) {
  std::printf("%s, type %d, at %d\n", what, (int)type, (int)at);
  std::exit(1);
}

template <typename T> double number(T x) { return load(&x, 1)[0]; }

template <typename T> std::vector<T> drawn(int64_t count) {
  static uint32_t state = 1;
  std::vector<T> numbers(count);
  for (T &to : numbers) {
    state = state * 1664525 + 1013904223;
    store(&to, splat((float)(int32_t)state / 2e9f), 1);
  }
  return numbers;
}

template <typename T> bool equal(const T *a, const T *b, int64_t count) { return !std::memcmp(a, b, count * sizeof(T)); }

template <typename T> void check_linear(int64_t type) {
  const int64_t rows = 33, n = 70, k = 45;
  auto x = drawn<T>(rows * k), weights = drawn<T>(n * k);
  std::vector<char> packed(skipjoin_packed_bytes(type, n, k, 0));
  const void *part = weights.data();
  skipjoin_pack_weights(type, &part, &n, n, k, 0, packed.data(), kThreads);
  auto product = [&](int64_t first, int64_t count) {
    std::vector<T> out(count * n);
    std::vector<char> scratch(skipjoin_scratch_bytes(type, count, k, kThreads));
    Linear call{};
    call.x = &x[first * k], call.x_stride = k, call.rows = count, call.weights = packed.data();
    call.n = n, call.k = k, call.out = out.data(), call.out_stride = n;
    call.scratch = scratch.data(), call.threads = kThreads;
    skipjoin_linear(type, &call);
    return out;
  };
  auto all = product(0, rows);
  for (int64_t i = 0; i < rows * n; i++) {
    double exact = 0;
    for (int64_t j = 0; j < k; j++) exact += number(x[i / n * k + j]) * number(weights[i % n * k + j]);
    if (!(std::fabs(exact - number(all[i])) < (type ? 0.05 : 1e-4))) fail("product", type, i);
  }
  for (int64_t count : {1, 2, 5, 7, 13})
    for (int64_t first = 0; first + count <= rows; first += count)
      if (!equal(product(first, count).data(), &all[first * n], count * n)) fail("rows", type, count);
}

template <typename T> void check_experts(int64_t type) {
  const int64_t rows = 30, experts = 5, per_row = 2, hidden = 45, width = 21;
  auto x = drawn<T>(rows * hidden), logits = drawn<T>(rows * experts);
  for (int64_t i = 0; i < rows; i++) logits[i * experts + 4] = logits[i * experts]; // the last one is never first
  std::vector<std::vector<char>> packed;
  auto product = [&](int64_t n, int64_t k, bool gated) {
    auto weights = drawn<T>(n * k);
    packed.emplace_back(skipjoin_packed_bytes(type, n, k, gated));
    const void *part = weights.data();
    skipjoin_pack_weights(type, &part, &n, n, k, gated, packed.back().data(), kThreads);
    Linear call{};
    call.weights = packed.back().data(), call.n = n, call.k = k, call.gated = gated, call.activation = gated ? kSilu : kNone;
    return call;
  };
  std::vector<Linear> up, down;
  for (int64_t e = 0; e < experts; e++) {
    up.push_back(product(2 * width, hidden, true));
    down.push_back(product(hidden, width, false));
  }
  auto added = [&](int64_t first, int64_t count) {
    std::vector<int64_t> chosen(count * per_row);
    std::vector<float> shares(count * per_row);
    std::vector<T> total(count * hidden);
    skipjoin::Experts call{up.data(), down.data(), experts, per_row, 1, 1.0, &x[first * hidden], hidden, count};
    call.chosen = chosen.data(), call.shares = shares.data(), call.total = total.data(), call.threads = kThreads;
    skipjoin_route(type, &logits[first * experts], experts, count, &call, chosen.data(), shares.data(), kThreads);
    for (int64_t i = 0; i < count; i++) {
      if (chosen[i * per_row] == 4 || std::fabs(shares[i * per_row] + shares[i * per_row + 1] - 1) > 1e-5)
        fail("route", type, first + i);
    }
    skipjoin_experts(type, &call);
    return total;
  };
  auto all = added(0, rows);
  for (int64_t count : {1, 3, 10})
    for (int64_t first = 0; first < rows; first += count)
      if (!equal(added(first, count).data(), &all[first * hidden], count * hidden)) fail("experts", type, count);
}

// bits, group: see Groups. Weights have a minimum, or values of codes.
template <typename T> void check_grouped(int64_t type, int64_t bits, int64_t group, const int8_t *values) {
  const int64_t rows = 33, n = 70, k = 64, groups = k / group;
  auto x = drawn<T>(rows * k);
  auto scales = drawn<float>(n * groups), minimums = drawn<float>(n * groups), codes = drawn<float>(n * k);
  std::vector<uint8_t> bytes(n * k);
  for (int64_t i = 0; i < n * k; i++) bytes[i] = (int)(codes[i] * 100) & ((1 << bits) - 1);
  Groups g{};
  g.outputs = n, g.inputs = k, g.bits = bits, g.group = group, g.offset = bits < 8 && !values ? 1 << (bits - 1) : 0;
  g.scale_bytes = 4, g.has_minimums = !values, g.values = values, g.strip_bytes = skipjoin_strip_bytes(&g);
  std::vector<uint8_t> strips((n + skipjoin_strip_lanes() - 1) / skipjoin_strip_lanes() * g.strip_bytes);
  g.strips = strips.data();
  auto *parts = (const uint8_t *)scales.data();
  skipjoin_pack_groups(&g, bytes.data(), parts, values ? nullptr : (const uint8_t *)minimums.data(), kThreads);
  auto product = [&](int64_t first, int64_t count) {
    std::vector<T> out(count * n);
    std::vector<char> scratch(skipjoin_scratch_bytes(type, count, k, kThreads));
    Linear call{};
    call.x = &x[first * k], call.x_stride = k, call.rows = count, call.groups = &g, call.matrices = 1;
    call.n = n, call.k = k, call.out = out.data(), call.out_stride = n;
    call.scratch = scratch.data(), call.threads = kThreads;
    skipjoin_linear(type, &call);
    return out;
  };
  auto all = product(0, rows);
  std::vector<T> numbers(k);
  for (int64_t output = 0; output < n; output++) {
    skipjoin_group_rows(type, &g, &output, 1, numbers.data(), kThreads);
    double size = 0;
    for (int64_t j = 0; j < k; j++) {
      int64_t code = bits == 8 ? (int8_t)bytes[output * k + j] : bytes[output * k + j], at = output * groups + j / group;
      double weight = scales[at] * (values ? values[code] : code - g.offset) + (values ? 0 : minimums[at]);
      if (!(std::fabs(weight - number(numbers[j])) <= std::fabs(weight) * 0.01 + 1e-6)) fail("row", type, output);
      size += std::fabs(weight);
    }
    for (int64_t r = 0; r < rows; r++) {
      double exact = 0;
      for (int64_t j = 0; j < k; j++) exact += number(x[r * k + j]) * number(numbers[j]);
      if (!(std::fabs(exact - number(all[r * n + output])) < size * 0.02)) fail("codes", type, output);
    }
  }
  for (int64_t count : {1, 2, 5, 7, 13})
    for (int64_t first = 0; first + count <= rows; first += count)
      if (!equal(product(first, count).data(), &all[first * n], count * n)) fail("rows of codes", type, count);
}

// With a window also with a cap and sinks.
template <typename T> void check_attention(int64_t type) {
  const int64_t tokens = 150, heads = 6, kv_heads = 2, dim = 40, block = 8, blocks = (tokens + block - 1) / block;
  auto query = drawn<T>(tokens * heads * dim), key = drawn<T>(tokens * kv_heads * dim), value = drawn<T>(key.size());
  auto sinks = drawn<float>(heads);
  std::vector<int64_t> slots(tokens), table(blocks);
  for (int64_t i = 0; i < blocks; i++) table[i] = blocks - 1 - i;
  for (int64_t t = 0; t < tokens; t++) slots[t] = table[t / block] * block + t % block;
  auto attended = [&](int64_t piece, int64_t window) {
    std::vector<T> keys(blocks * block * kv_heads * dim), values(keys.size()), out(tokens * heads * dim);
    for (int64_t from = 0; from < tokens; from += piece) {
      int64_t count = std::min(piece, tokens - from), starts[] = {0, count}, context = from + count;
      Call c{};
      c.query = &query[from * heads * dim], c.key = &key[from * kv_heads * dim], c.value = &value[from * kv_heads * dim];
      c.query_token = heads * dim, c.key_token = c.value_token = kv_heads * dim;
      c.query_head = c.key_head = c.value_head = dim;
      c.keys = keys.data(), c.values = values.data();
      c.block_stride = block * kv_heads * dim, c.slot_stride = kv_heads * dim, c.head_stride = dim;
      c.out = &out[from * heads * dim];
      c.slots = &slots[from], c.query_start = starts, c.context = &context, c.tables = table.data();
      c.segments = 1, c.table_width = blocks, c.block_size = block;
      c.heads = heads, c.kv_heads = kv_heads, c.dim = dim, c.window = window, c.scale = 0.3;
      if (window) c.cap = 1.5, c.sinks = sinks.data();
      skipjoin_paged_attention(type, &c, kThreads);
    }
    return out;
  };
  for (int64_t window : {0, 21}) {
    auto whole = attended(tokens, window);
    for (int64_t i = 0; i < tokens * heads; i++) {
      int64_t t = i / heads, head = i % heads / (heads / kv_heads);
      std::vector<double> sums(dim);
      double total = window ? std::exp(sinks[i % heads]) : 0;
      for (int64_t s = window ? std::max<int64_t>(0, t + 1 - window) : 0; s <= t; s++) {
        double score = 0;
        for (int64_t d = 0; d < dim; d++)
          score += number(query[i * dim + d]) * number(key[(s * kv_heads + head) * dim + d]);
        double weight = std::exp(window ? 1.5 * std::tanh(score * 0.3 / 1.5) : score * 0.3);
        total += weight;
        for (int64_t d = 0; d < dim; d++) sums[d] += weight * number(value[(s * kv_heads + head) * dim + d]);
      }
      for (int64_t d = 0; d < dim; d++)
        if (!(std::fabs(sums[d] / total - number(whole[i * dim + d])) < (type ? 0.02 : 1e-5))) fail("attention", type, i);
    }
    for (int64_t piece : {1, 7, 64})
      if (!equal(attended(piece, window).data(), whole.data(), tokens * heads * dim)) fail("cuts", type, piece);
  }
}

} // namespace

int main() {
  for (int64_t type : {0, 1, 2})
    with_type(type, [&](auto t) {
      using T = decltype(t);
      check_linear<T>(type);
      check_experts<T>(type);
      const int8_t values[16] = {-127, -99, -60, -20, -9, 0, 1, 2, 3, 7, 20, 33, 61, 90, 100, 127};
      for (int64_t bits : {4, 6, 8})
        for (int64_t group : {16, 32, 64}) check_grouped<T>(type, bits, group, nullptr);
      check_grouped<T>(type, 4, 32, values);
      check_attention<T>(type);
    });
  std::printf("%s ok\n", skipjoin_path());
}
