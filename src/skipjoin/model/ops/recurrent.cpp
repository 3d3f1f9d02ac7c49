// Layers with a state of constant size instead of KV: short causal convolutions, linear recurrences, and gates.
//
// Every sum has a fixed order and every token of a sequence follows the one before, so that the bits do not depend on
// how a prompt is cut into slices, nor on the batch.
#include "calls.inc.cpp"
#include "pool.inc.cpp"
#include "simd.inc.cpp"

#include <algorithm>
#include <cmath>
#include <vector>

using namespace skipjoin;

namespace {

constexpr int64_t kMaxKernel = 16;
// Vectors of values that a recurrence keeps in registers.
constexpr int kColumns = kLanes == 16 ? 8 : 4;

// Sequences of a step. Captures, which are in order, are snapshots after some tokens of a sequence.
struct Sequences {
  const int64_t *query_start, *starts, *slots; // [count + 1], likewise [count]: earlier tokens, and slots of states
  int64_t count;
  const int64_t *captures; // [captured][3]: sequence, tokens, slot
  int64_t captured;
};

struct Convolve {
  const void *x; // [tokens][channels]
  int64_t x_stride, channels, kernel;
  const float *weights, *bias;    // [kernel][channels], oldest first; [channels] or null
  const void *before, *after;     // factors of inputs and of outputs, or null; strides as of x
  void *out;                      // [tokens][channels], contiguous
  void *states;                   // [slot]: [kernel - 1][channels], the last inputs
  int64_t state_stride, is_gated; // is_gated: silu of outputs
  Sequences sequences;
  int64_t threads;
};

// The state S [key][value] of a head becomes decay * S + key x update, and is then read by the query. A delta rule
// updates by the difference to what the key has read; Mamba-2 by the value times the step.
struct Recur {
  const void *query, *key, *value; // [tokens][key heads][key], likewise, [tokens][heads][value]
  int64_t query_stride, key_stride, value_stride, heads, key_heads, key_dim, value_dim;
  const void *decay, *rate; // [tokens][heads]; rate: of the delta rule, or null. Without log_a, float
  int64_t decay_stride, rate_stride;
  // [heads]; skip: factor of values added to outputs, or null. Without log_a, the inputs are logarithms of decays, of
  // each key if is_keyed, and shares that the delta rule learns.
  const float *log_a, *decay_bias, *skip;
  int64_t is_keyed;
  double least, most;                     // of Mamba-2's steps
  float *states;                          // [slot]: [heads][key][value]
  int64_t state_stride;
  void *out; // [tokens][heads][value], contiguous
  Sequences sequences;
  int64_t threads;
};

// The state S [key][channel] becomes exp(a * step) * S + key x (step * value), and is then read by the query. Without
// a, it becomes exp(step) * S + key x value, and steps are float.
struct Scan {
  const void *query, *key, *value, *step; // [tokens][key] twice, [tokens][channels] twice
  int64_t query_stride, key_stride, value_stride, step_stride, key_dim, channels;
  const float *a, *step_bias, *skip; // [key][channels], [channels], likewise or null
  float *states;                     // [slot]: [key][channels]
  int64_t state_stride;
  void *out; // [tokens][channels], contiguous
  Sequences sequences;
  int64_t threads;
};

// Average of values with weights exp(key), which decay by exp(decay) with each further token; that of the last token has
// the factor exp(bonus). The state has sums of weighted values, of weights, and the exponent of both.
struct Average {
  const void *key, *value; // [tokens][channels]
  int64_t key_stride, value_stride, channels;
  const float *decay, *bonus; // [channels]
  float *states;              // [slot]: [3][channels]
  int64_t state_stride;
  void *out; // [tokens][channels], contiguous
  Sequences sequences;
  int64_t threads;
};

enum GateKind { kNormThenGate, kGateThenNorm, kSigmoid };

struct Gate {
  void *x; // [rows][groups][width], in place
  int64_t rows, groups, width;
  const void *gate; // [rows][groups][width], or [rows] if is_single
  int64_t gate_stride, is_single;
  const float *weights; // [period][width], repeated; null for kSigmoid
  int64_t period, kind;
  double eps;
  int64_t threads;
};

template <typename Work> void typed(int64_t type, Work &&work) {
  if (type == 0) work(float{});
  if (type == 1) work(bfloat16{});
  if (type == 2 && kHasHalf) work(half{});
}

template <typename T> Floats rounded(Floats x) {
  T values[kLanes];
  store(values, x);
  return load(values);
}

template <typename T> float number(const T *from) { return load(from, 1)[0]; }

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Calls at(tokens, slot) for the captures of a sequence, given the number of tokens that it has done.
struct Captures {
  const int64_t *next, *end;

  Captures(const Sequences &of, int64_t sequence) : next(of.captures), end(of.captures + 3 * of.captured) {
    while (next < end && next[0] < sequence) next += 3;
    const int64_t *last = next;
    while (last < end && last[0] == sequence) last += 3;
    end = last;
  }

  template <typename At> void after(int64_t tokens, At &&at) {
    for (; next < end && next[1] == tokens; next += 3) at(next[2]);
  }
};

// Convolves the channels of one vector in one sequence.
template <typename T> void convolve(const Convolve &c, int64_t sequence, int64_t channel) {
  const Sequences &of = c.sequences;
  int64_t count = c.channels - channel, past = c.kernel - 1;
  Floats window[kMaxKernel], weights[kMaxKernel];
  T *states = (T *)c.states + channel;
  auto row = [&](int64_t slot, int64_t i) { return states + slot * c.state_stride + i * c.channels; };
  for (int64_t i = 0; i < c.kernel; i++) weights[i] = load(c.weights + i * c.channels + channel, count);
  for (int64_t i = 0; i < past; i++)
    window[i] = of.starts[sequence] ? load((const T *)row(of.slots[sequence], i), count) : Floats{};
  auto keep = [&](int64_t slot) {
    for (int64_t i = 0; i < past; i++) store(row(slot, i), window[i], count);
  };
  Floats bias = c.bias ? load(c.bias + channel, count) : Floats{};
  Captures captures(of, sequence);
  int64_t begin = of.query_start[sequence], end = of.query_start[sequence + 1];
  for (int64_t token = begin; token < end; token++) {
    int64_t at = token * c.x_stride + channel;
    Floats x = load((const T *)c.x + at, count);
    if (c.before) x = rounded<T>(x * load((const T *)c.before + at, count));
    window[past] = x;
    Floats sum = bias;
    for (int64_t i = 0; i < c.kernel; i++) sum = fma(weights[i], window[i], sum);
    if (c.is_gated) sum = silu(sum);
    if (c.after) sum = sum * load((const T *)c.after + at, count);
    store((T *)c.out + token * c.channels + channel, sum, count);
    for (int64_t i = 0; i < past; i++) window[i] = window[i + 1];
    captures.after(token + 1 - begin, keep);
  }
  keep(of.slots[sequence]);
}

// Reads a key or query of one token. The delta rule normalizes both.
template <typename T> void read_unit(const T *from, int64_t count, bool is_unit, float scale, float *to) {
  Floats squares{};
  for (int64_t i = 0; i < count; i += kLanes) {
    Floats x = load(from + i, count - i);
    squares = fma(x, x, squares);
    store(to + i, x, count - i);
  }
  if (!is_unit) return;
  float factor = scale / std::sqrt(sum_of(squares) + 1e-6f);
  for (int64_t i = 0; i < count; i++) to[i] *= factor;
}

// Updates and reads `kColumns` vectors of the state by one token; `value` is overwritten by the output. The state is
// multiplied by `decay`, or by the factor of each key in `decays`.
template <bool WHOLE>
void advance(float *state, int64_t stride, int64_t columns, const float *key, const float *query, int64_t rows,
             float decay, const float *decays, float rate, bool is_delta, float *value) {
  Floats update[kColumns], out[kColumns];
  auto count = [&](int v) { return WHOLE ? (int64_t)kLanes : columns - v * kLanes; };
  for (int v = 0; v < kColumns; v++) update[v] = load(value + v * kLanes, count(v)), out[v] = Floats{};
  if (is_delta) {
    Floats known[kColumns] = {};
    for (int64_t i = 0; i < rows; i++)
      for (int v = 0; v < kColumns; v++)
        known[v] = fma(splat(decays ? key[i] * decays[i] : key[i]), load(state + i * stride + v * kLanes, count(v)),
                       known[v]);
    for (int v = 0; v < kColumns; v++) update[v] = update[v] - known[v] * decay;
  }
  for (int v = 0; v < kColumns; v++) update[v] = update[v] * rate;
  for (int64_t i = 0; i < rows; i++)
    for (int v = 0; v < kColumns; v++) {
      float *at = state + i * stride + v * kLanes;
      Floats now = fma(splat(key[i]), update[v], load(at, count(v)) * (decays ? decays[i] : decay));
      store(at, now, count(v));
      out[v] = fma(splat(query[i]), now, out[v]);
    }
  for (int v = 0; v < kColumns; v++) store(value + v * kLanes, out[v], count(v));
}

template <typename T> void recur(const Recur &c, int64_t sequence, int64_t head) {
  const Sequences &of = c.sequences;
  int64_t size = c.key_dim * c.value_dim, key_head = head / (c.heads / c.key_heads);
  auto state_in = [&](int64_t slot) { return c.states + slot * c.state_stride + head * size; };
  float *state = state_in(of.slots[sequence]);
  if (!of.starts[sequence]) std::fill(state, state + size, 0.0f);
  bool is_delta = c.rate != nullptr;
  float speed = c.log_a ? -std::exp(c.log_a[head]) : 1.0f, scale = is_delta ? 1.0f / std::sqrt((float)c.key_dim) : 1.0f;
  std::vector<float> memory(3 * c.key_dim + 2 * c.value_dim);
  float *decays = c.is_keyed ? memory.data() + 2 * c.key_dim + 2 * c.value_dim : nullptr;
  float *query = memory.data(), *key = query + c.key_dim, *value = key + c.key_dim, *given = value + c.value_dim;
  Captures captures(of, sequence);
  int64_t begin = of.query_start[sequence], end = of.query_start[sequence + 1];
  for (int64_t token = begin; token < end; token++) {
    read_unit((const T *)c.query + token * c.query_stride + key_head * c.key_dim, c.key_dim, is_delta, scale, query);
    read_unit((const T *)c.key + token * c.key_stride + key_head * c.key_dim, c.key_dim, is_delta, 1.0f, key);
    read_unit((const T *)c.value + token * c.value_stride + head * c.value_dim, c.value_dim, false, 1.0f, value);
    float step = 0, rate;
    if (!c.log_a) {
      const float *logs = (const float *)c.decay + token * c.decay_stride;
      if (decays)
        for (int64_t i = 0; i < c.key_dim; i++) decays[i] = std::exp(logs[head * c.key_dim + i]);
      else
        step = logs[head];
      rate = ((const float *)c.rate)[token * c.rate_stride + head];
    } else {
      rate = step = softplus(number((const T *)c.decay + token * c.decay_stride + head) + c.decay_bias[head]);
      if (is_delta)
        rate = 1.0f / (1.0f + std::exp(-number((const T *)c.rate + token * c.rate_stride + head)));
      else
        rate = step = std::min((float)c.most, std::max((float)c.least, step));
    }
    float decay = std::exp(speed * step);
    if (c.skip) std::copy(value, value + c.value_dim, given);
    for (int64_t column = 0; column < c.value_dim; column += kColumns * kLanes) {
      int64_t columns = c.value_dim - column;
      (columns < kColumns * kLanes ? advance<false> : advance<true>)(
          state + column, c.value_dim, columns, key, query, c.key_dim, decay, decays, rate, is_delta, value + column);
    }
    if (c.skip)
      for (int64_t i = 0; i < c.value_dim; i++) value[i] += c.skip[head] * given[i];
    T *out = (T *)c.out + (token * c.heads + head) * c.value_dim;
    for (int64_t i = 0; i < c.value_dim; i += kLanes)
      store(out + i, load(value + i, c.value_dim - i), c.value_dim - i);
    captures.after(token + 1 - begin, [&](int64_t slot) { std::copy(state, state + size, state_in(slot)); });
  }
}

// Scans the channels of one vector in one sequence.
template <typename T> void scan(const Scan &c, int64_t sequence, int64_t channel) {
  const Sequences &of = c.sequences;
  int64_t count = std::min<int64_t>(kLanes, c.channels - channel);
  auto state_in = [&](int64_t slot) { return c.states + slot * c.state_stride + channel; };
  float *state = state_in(of.slots[sequence]);
  if (!of.starts[sequence])
    for (int64_t i = 0; i < c.key_dim; i++) std::fill_n(state + i * c.channels, count, 0.0f);
  Floats bias = c.a ? load(c.step_bias + channel, count) : Floats{};
  Floats skip = c.skip ? load(c.skip + channel, count) : Floats{};
  Captures captures(of, sequence);
  int64_t begin = of.query_start[sequence], end = of.query_start[sequence + 1];
  for (int64_t token = begin; token < end; token++) {
    const T *query = (const T *)c.query + token * c.query_stride, *key = (const T *)c.key + token * c.key_stride;
    Floats step, value = load((const T *)c.value + token * c.value_stride + channel, count);
    if (c.a) {
      float steps[kLanes];
      store(steps, load((const T *)c.step + token * c.step_stride + channel, count) + bias);
      for (int64_t i = 0; i < count; i++) steps[i] = softplus(steps[i]);
      step = load(steps);
    } else {
      step = load((const float *)c.step + token * c.step_stride + channel, count);
    }
    Floats update = c.a ? step * value : value, out = skip * value;
    for (int64_t i = 0; i < c.key_dim; i++) {
      float *at = state + i * c.channels;
      Floats decay = exponential(c.a ? load(c.a + i * c.channels + channel, count) * step : step);
      Floats now = fma(splat(number(key + i)), update, load(at, count) * decay);
      store(at, now, count);
      out = fma(splat(number(query + i)), now, out);
    }
    store((T *)c.out + token * c.channels + channel, out, count);
    captures.after(token + 1 - begin, [&](int64_t slot) {
      float *to = state_in(slot);
      for (int64_t i = 0; i < c.key_dim; i++) std::copy_n(state + i * c.channels, count, to + i * c.channels);
    });
  }
}

// Averages the channels of one vector in one sequence.
template <typename T> void average(const Average &c, int64_t sequence, int64_t channel) {
  const Sequences &of = c.sequences;
  int64_t count = c.channels - channel;
  auto row = [&](int64_t slot, int64_t i) { return c.states + slot * c.state_stride + i * c.channels + channel; };
  Floats decay = load(c.decay + channel, count), bonus = load(c.bonus + channel, count);
  Floats sum{}, total{}, most = splat(-1e38f);
  if (int64_t slot = of.slots[sequence]; of.starts[sequence])
    sum = load(row(slot, 0), count), total = load(row(slot, 1), count), most = load(row(slot, 2), count);
  auto keep = [&](int64_t slot) {
    store(row(slot, 0), sum, count), store(row(slot, 1), total, count), store(row(slot, 2), most, count);
  };
  Captures captures(of, sequence);
  int64_t begin = of.query_start[sequence], end = of.query_start[sequence + 1];
  for (int64_t token = begin; token < end; token++) {
    Floats key = load((const T *)c.key + token * c.key_stride + channel, count);
    Floats value = load((const T *)c.value + token * c.value_stride + channel, count);
    Floats now = key + bonus, top = larger(most, now);
    Floats past = exponential(most - top), last = exponential(now - top);
    store((T *)c.out + token * c.channels + channel, fma(past, sum, last * value) / fma(past, total, last), count);
    now = most + decay, top = larger(now, key);
    past = exponential(now - top), last = exponential(key - top);
    sum = fma(past, sum, last * value), total = fma(past, total, last), most = top;
    captures.after(token + 1 - begin, keep);
  }
  keep(of.slots[sequence]);
}

template <typename T> void gate_row(const Gate &c, int64_t row, int64_t group) {
  T *x = (T *)c.x + (row * c.groups + group) * c.width;
  const T *gate = (const T *)c.gate + row * c.gate_stride + (c.is_single ? 0 : group * c.width);
  auto gate_at = [&](int64_t i) { return c.is_single ? splat(number(gate)) : load(gate + i, c.width - i); };
  if (c.kind == kSigmoid) {
    for (int64_t i = 0; i < c.width; i += kLanes)
      store(x + i, gated(load(x + i, c.width - i), gate_at(i)), c.width - i);
    return;
  }
  bool is_gated_first = c.kind == kGateThenNorm;
  auto input = [&](int64_t i) {
    Floats value = load(x + i, c.width - i);
    return is_gated_first ? value * silu(gate_at(i)) : value;
  };
  Floats squares{};
  for (int64_t i = 0; i < c.width; i += kLanes) {
    Floats value = input(i);
    squares = fma(value, value, squares);
  }
  float factor = 1.0f / std::sqrt(sum_of(squares) / c.width + (float)c.eps);
  const float *weights = c.weights + (group % c.period) * c.width;
  for (int64_t i = 0; i < c.width; i += kLanes) {
    Floats value = input(i) * factor * load(weights + i, c.width - i);
    store(x + i, is_gated_first ? value : value * silu(gate_at(i)), c.width - i);
  }
}

} // namespace

extern "C" {

int64_t skipjoin_convolve_bytes() { return sizeof(Convolve); }
int64_t skipjoin_recur_bytes() { return sizeof(Recur); }
int64_t skipjoin_scan_bytes() { return sizeof(Scan); }
int64_t skipjoin_average_bytes() { return sizeof(Average); }
int64_t skipjoin_gate_bytes() { return sizeof(Gate); }
int64_t skipjoin_max_kernel() { return kMaxKernel; }

void skipjoin_convolve(int64_t type, const Convolve *call) {
  int64_t vectors = (call->channels + kLanes - 1) / kLanes;
  typed(type, [&](auto t) {
    share(call->threads, vectors * call->sequences.count, 4, [&](int64_t i) {
      convolve<decltype(t)>(*call, i / vectors, i % vectors * kLanes);
    });
  });
}

void skipjoin_recur(int64_t type, const Recur *call) {
  typed(type, [&](auto t) {
    share(call->threads, call->heads * call->sequences.count, 1, [&](int64_t i) {
      recur<decltype(t)>(*call, i / call->heads, i % call->heads);
    });
  });
}

void skipjoin_scan(int64_t type, const Scan *call) {
  int64_t vectors = (call->channels + kLanes - 1) / kLanes;
  typed(type, [&](auto t) {
    share(call->threads, vectors * call->sequences.count, 4, [&](int64_t i) {
      scan<decltype(t)>(*call, i / vectors, i % vectors * kLanes);
    });
  });
}

void skipjoin_average(int64_t type, const Average *call) {
  int64_t vectors = (call->channels + kLanes - 1) / kLanes;
  typed(type, [&](auto t) {
    share(call->threads, vectors * call->sequences.count, 4, [&](int64_t i) {
      average<decltype(t)>(*call, i / vectors, i % vectors * kLanes);
    });
  });
}

void skipjoin_gate(int64_t type, const Gate *call) {
  typed(type, [&](auto t) {
    share(call->threads, call->rows * call->groups, 8, [&](int64_t i) {
      gate_row<decltype(t)>(*call, i / call->groups, i % call->groups);
    });
  });
}
}
