// MLPs of which each row uses some, the experts: routing, products of each expert's rows, and their weighted sum.
//
// Slot s * per_row + j is the j-th expert of row s. Slots are sorted by expert, and an expert's rows are multiplied
// together, by the products of layer_ops.cpp and grouped.cpp. The bits of a row depend on nothing else: the experts of
// equal logits are those of the lowest numbers, and a row's experts are added in the order of their logits.
#include "outputs.inc.cpp"
#include "pool.inc.cpp"
#include "products.inc.cpp"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

using skipjoin::Experts;
using skipjoin::Groups;
using skipjoin::Linear;

extern "C" {

void skipjoin_multiply(int64_t type, const Linear *call);
int64_t skipjoin_panel_bytes(int64_t type, const Linear *call);
int64_t skipjoin_scratch_bytes(int64_t type, int64_t m, int64_t k, int64_t threads);
}

namespace {

// Rows whose products take about as long as reading a panel of weights.
constexpr int64_t kReadRows = 16;
constexpr int64_t kTasksPerThread = 4;

// Memory that an operation keeps for the next one.
class Kept {
public:
  template <typename T> T *get(int64_t count) {
    int64_t bytes = count * sizeof(T) + 64;
    if (bytes > bytes_) memory_.reset(new char[bytes]), bytes_ = bytes;
    return (T *)(((uintptr_t)memory_.get() + 63) & ~(uintptr_t)63);
  }

private:
  std::unique_ptr<char[]> memory_;
  int64_t bytes_ = 0;
};

int64_t outputs_of(const Linear &c) { return c.gated ? c.n / 2 : c.n; }

// Outputs per panel or strip.
int64_t panel_outputs(const Linear &c) { return c.groups ? kLanes : c.gated ? kPanel / 2 : kPanel; }

int64_t panels_of(const Linear &c) { return (outputs_of(c) + panel_outputs(c) - 1) / panel_outputs(c); }

// Some panels of an expert's weights.
struct Task {
  int64_t expert, first, count;
};

// Returns the product with some panels only; `copies` holds its groups.
Linear part_of(const Linear &whole, const Task &task, int64_t panel_bytes, Groups *copies) {
  Linear c = whole;
  int64_t begin = task.first * panel_outputs(c), count = std::min(task.count * panel_outputs(c), outputs_of(c) - begin);
  if (c.groups) {
    for (int m = 0; m < (c.gated ? 2 : 1); m++) {
      copies[m] = c.groups[m];
      copies[m].strips += task.first * copies[m].strip_bytes;
      copies[m].outputs = count;
      if (copies[m].bias) copies[m].bias += begin;
    }
    c.groups = copies;
  } else {
    c.weights = (const char *)c.weights + task.first * panel_bytes;
    if (c.bias) c.bias += task.first * kPanel;
  }
  c.n = c.gated ? 2 * count : count;
  return c;
}

// Rows of each expert: slots sorted by expert, then by row.
class Sorted {
public:
  const int64_t *begins, *slots, *places; // begins: [experts + 1] into slots; places: index of each slot in slots

  Sorted(const Experts &e) {
    thread_local Kept memory;
    int64_t count = e.rows * e.per_row;
    auto *begin = memory.get<int64_t>(e.count + 1 + 2 * count), *slot = begin + e.count + 1, *place = slot + count;
    std::fill(begin, slot, 0);
    for (int64_t s = 0; s < count; s++) begin[e.chosen[s] + 1]++;
    for (int64_t i = 0; i < e.count; i++) begin[i + 1] += begin[i];
    for (int64_t s = 0; s < count; s++) place[s] = begin[e.chosen[s]]++, slot[place[s]] = s;
    for (int64_t i = e.count; i > 0; i--) begin[i] = begin[i - 1];
    begin[0] = 0;
    begins = begin, slots = slot, places = place;
  }

  int64_t rows_of(int64_t expert) const { return begins[expert + 1] - begins[expert]; }
};

// Divides the weights of experts that have rows, such that threads end at about the same time.
std::vector<Task> tasks_of(const Experts &e, const Linear *weights, const Sorted &sorted) {
  auto cost_of = [&](int64_t i) { return sorted.rows_of(i) ? panels_of(weights[i]) * (sorted.rows_of(i) + kReadRows) : 0; };
  int64_t total = 0;
  for (int64_t i = 0; i < e.count; i++) total += cost_of(i);
  int64_t wanted = e.threads > 1 ? std::max<int64_t>(1, total / (e.threads * kTasksPerThread)) : total;
  std::vector<Task> tasks;
  for (int64_t i = 0; i < e.count; i++) {
    if (!sorted.rows_of(i)) continue;
    int64_t panels = panels_of(weights[i]), pieces = std::min(panels, (cost_of(i) + wanted - 1) / wanted);
    for (int64_t p = 0; p < pieces; p++) {
      int64_t first = panels * p / pieces;
      tasks.push_back({i, first, panels * (p + 1) / pieces - first});
    }
  }
  return tasks;
}

// Multiplies each expert's rows: out has a row per slot, in sorted order. rows_from(begin, count, gathered, stride)
// returns the rows of these slots and sets their stride.
template <typename T, typename Rows>
void multiply_each(int64_t type, const Experts &e, const Linear *weights, const Sorted &sorted, T *out, Rows &&rows_from) {
  std::vector<Task> tasks = tasks_of(e, weights, sorted);
  int64_t width = outputs_of(weights[0]), count = tasks.size();
  std::atomic<int64_t> counter{0};
  skipjoin::run_on_pool(e.threads, [&](int) {
    auto take = [&] { return counter.fetch_add(1, std::memory_order_relaxed); };
    thread_local Kept gathered, scratch;
    const T *x = nullptr;
    int64_t stride = 0, held = -1;
    int64_t index = take();
    for (int64_t next; index < count; index = next) {
      next = take(); // known before this task begins, which can thus fetch its first weights
      const Task &task = tasks[index];
      const Linear &whole = weights[task.expert];
      int64_t begin = sorted.begins[task.expert], rows = sorted.rows_of(task.expert);
      if (held != task.expert) x = rows_from(begin, rows, gathered, stride), held = task.expert;
      Groups copies[2];
      Linear call = part_of(whole, task, skipjoin_panel_bytes(type, &whole), copies);
      call.x = x, call.x_stride = stride, call.rows = rows, call.threads = 1, call.add = 0;
      call.out = out + begin * width + task.first * panel_outputs(whole), call.out_stride = width;
      call.scratch = scratch.get<char>(skipjoin_scratch_bytes(type, rows, whole.k, 1));
      if (next < count) {
        const Linear &later = weights[tasks[next].expert];
        call.then_bytes = skipjoin_panel_bytes(type, &later);
        call.then = (const char *)(later.groups ? later.groups->strips : later.weights) + tasks[next].first * call.then_bytes;
      }
      skipjoin_multiply(type, &call);
    }
  });
}

template <typename T> void add_experts(int64_t type, const Experts &e) {
  thread_local Kept inner_memory, found_memory;
  Sorted sorted(e);
  int64_t slots = e.rows * e.per_row, hidden = e.up[0].k, width = outputs_of(e.up[0]), outputs = e.down[0].n;
  T *inner = inner_memory.get<T>(slots * width), *found = found_memory.get<T>(slots * outputs);
  multiply_each(type, e, e.up, sorted, inner, [&](int64_t begin, int64_t rows, Kept &gathered, int64_t &stride) {
    auto row_of = [&](int64_t i) { return (const T *)e.x + sorted.slots[begin + i] / e.per_row * e.x_stride; };
    stride = hidden;
    if (rows == 1) return row_of(0);
    T *to = gathered.get<T>(rows * hidden);
    for (int64_t i = 0; i < rows; i++) std::memcpy(to + i * hidden, row_of(i), hidden * sizeof(T));
    return (const T *)to;
  });
  multiply_each(type, e, e.down, sorted, found, [&](int64_t begin, int64_t, Kept &, int64_t &stride) {
    stride = width;
    return (const T *)inner + begin * width;
  });
  skipjoin::share(slots * outputs > 1 << 16 ? e.threads : 1, e.rows, 4, [&](int64_t row) {
    T *total = (T *)e.total + row * outputs;
    const int64_t *places = sorted.places + row * e.per_row;
    const float *shares = e.shares + row * e.per_row;
    for (int64_t i = 0; i < outputs; i += kLanes) {
      Floats sum{};
      for (int64_t j = 0; j < e.per_row; j++) sum += shares[j] * load(found + places[j] * outputs + i, outputs - i);
      store(total + i, load(total + i, outputs - i) + sum, outputs - i);
    }
  });
}

// Sorts the largest logits first, and the lower expert of two with the same.
template <typename T> void choose(const T *logits, int64_t experts, int64_t per_row, int64_t *chosen, float *values) {
  int64_t held = 0;
  for (int64_t begin = 0; begin < experts; begin += kLanes) {
    float some[kLanes];
    store(some, load(logits + begin, experts - begin));
    for (int64_t i = begin; i < std::min(experts, begin + kLanes); i++) {
      float value = some[i - begin];
      if (held == per_row && !(value > values[held - 1])) continue;
      int64_t at = held < per_row ? held++ : held - 1;
      for (; at > 0 && value > values[at - 1]; at--) values[at] = values[at - 1], chosen[at] = chosen[at - 1];
      values[at] = value, chosen[at] = i;
    }
  }
}

// Returns the sum of exponentials of `count` numbers less `top`, and writes them to `to` unless that is null.
template <typename T> float exponentials(const T *from, int64_t count, float top, float *to) {
  Floats sums{};
  for (int64_t i = 0; i < count; i += kLanes) {
    Floats found = exponential(load(from + i, count - i) - top);
    found = (Ints)lane_numbers() < (Ints)splat((uint32_t)(count - i)) ? found : Floats{};
    if (to) store(to + i, found, count - i);
    sums += found;
  }
  return sum_of(sums);
}

} // namespace

extern "C" {

int64_t skipjoin_experts_bytes() { return sizeof(Experts); }

// Chooses the experts of each row of logits [rows][experts], and their shares.
void skipjoin_route(int64_t type, const void *logits, int64_t stride, int64_t rows, const Experts *call,
                    int64_t *chosen, float *shares, int64_t threads) {
  int64_t experts = call->count, per_row = call->per_row, among = call->among;
  with_type(type, [&](auto t) {
    using T = decltype(t);
    skipjoin::share(rows * experts > 1 << 14 ? threads : 1, rows, 16, [&](int64_t row) {
      const T *from = (const T *)logits + row * stride;
      float *to = shares + row * per_row;
      choose(from, experts, per_row, chosen + row * per_row, to);
      float top = to[0], whole = among ? 0 : exponentials(from, experts, top, nullptr);
      float sum = exponentials(to, per_row, top, to);
      for (int64_t j = 0; j < per_row; j++) to[j] = to[j] / (among ? sum : whole) * (float)call->scale;
    });
  });
}

// Adds to each row of `total` the sum of its experts' outputs times their shares.
void skipjoin_experts(int64_t type, const Experts *call) {
  skipjoin::Timed timed(skipjoin::kMlp);
  if (call->rows) with_type(type, [&](auto t) { add_experts<decltype(t)>(type, *call); });
}
}
