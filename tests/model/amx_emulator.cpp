// Emulator of Intel's AMX instructions (tiles, products of bfloat16 and of signed bytes) for one process without permission to use them,
// compiled into a library of operations or preloaded. The processor raises an illegal-instruction signal, which is
// handled here: the handler decodes the instruction, executes it on this thread's tiles, and continues after it. Where
// a processor would fault, the process exits with a message that names the instruction.
//
// A processor without AMX reports all of them. One with AMX reports those that access a tile's data, in a process that
// never asked the kernel for permission, but executes LDTILECFG, STTILECFG and TILERELEASE itself. The handler then
// reads the configuration from the registers that the kernel saved for the signal, and leaves a mark there, which
// STTILECFG shows as the start row. AMX_STAND_IN makes a processor without AMX behave like one with it, for tests of
// that case.
//
// Follows Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2. Palette 1 has eight tiles of at most
// 16 rows of 64 bytes.
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include <cpuid.h>
#include <dlfcn.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

namespace {

constexpr int kTiles = 8, kRows = 16, kBytes = 64, kMostThreads = 256;

// Memory operand of LDTILECFG and STTILECFG.
struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[kTiles], reserved_bytes[8];
  uint8_t rows[kTiles], reserved_rows[8];
};
static_assert(sizeof(Config) == 64);

struct State {
  Config config; // palette 0: not configured
  unsigned char tiles[kTiles][kRows][kBytes];
  Config stand_in; // for the registers that `saved_config` finds empty
};

// Start row of a processor configuration that `State` has read already. Loading any configuration, even an equal one,
// removes it.
constexpr uint8_t kKnown = 0xff;

// State of every thread. Each thread has a pointer into it, because a signal handler cannot allocate memory.
State states[kMostThreads];
std::atomic<int> threads{0};
__attribute__((tls_model("initial-exec"))) thread_local State *own = nullptr;

std::atomic<int64_t> products{0};
struct sigaction before;
unsigned saved_at; // offset of the configuration in saved registers

enum Operation { kLoadConfig, kStoreConfig, kRelease, kZero, kLoad, kStore, kMultiply, kMultiplyBytes };
const char *const kNames[] = {"LDTILECFG", "STTILECFG", "TILERELEASE", "TILEZERO", "TILELOADD", "TILESTORED", "TDPBF16PS", "TDPBSSD"};

struct Instruction {
  Operation operation;
  int tile = 0, inputs = 0, columns = 0; // tiles of products: sums, inputs, columns of weights
  int64_t address = 0, stride = 0, length = 5;
  const uint8_t *at = nullptr;
};

[[noreturn]] void fail(const Instruction &i, const char *fault, const char *why, ...) {
  char reason[128], text[512];
  va_list values;
  va_start(values, why);
  std::vsnprintf(reason, sizeof reason, why, values);
  va_end(values);
  Dl_info place{};
  dladdr(i.at, &place);
  int length = std::snprintf(text, sizeof text, "AMX emulator: %s at rip %p (%s+0x%lx): %s: %s\n", kNames[i.operation],
                             (const void *)i.at, place.dli_fname ? place.dli_fname : "?",
                             (long)(i.at - (const uint8_t *)place.dli_fbase), fault, reason);
  (void)!write(2, text, length);
  std::abort();
}

int64_t register_of(const ucontext_t *context, int number) {
  constexpr int kPlaces[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                             REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return context->uc_mcontext.gregs[kPlaces[number]];
}

int64_t displacement(const uint8_t *at, int bytes) {
  int8_t one = (int8_t)*at;
  int32_t four;
  std::memcpy(&four, at, sizeof four);
  return bytes == 1 ? one : four;
}

// Decodes a memory operand. base, index: bits that the prefix adds to register numbers. Returns whether there is a SIB
// byte.
bool locate(const ucontext_t *context, int base, int index, Instruction &i) {
  const uint8_t *next = i.at + 5;
  int mode = i.at[4] >> 6, low = i.at[4] & 7;
  bool has_sib = low == 4, has_base = true;
  if (has_sib) {
    int sib = *next++, number = index | (sib >> 3 & 7);
    low = sib & 7, has_base = mode != 0 || low != 5;
    // Number 4 means no index.
    i.stride = number == 4 ? 0 : (int64_t)((uint64_t)register_of(context, number) << (sib >> 6));
  }
  int bytes = mode == 1 ? 1 : mode == 2 || (mode == 0 && low == 5) ? 4 : 0;
  int64_t offset = bytes ? displacement(next, bytes) : 0;
  next += bytes, i.length = next - i.at;
  if (!has_sib && mode == 0 && low == 5)
    i.address = (int64_t)next + offset; // relative to the next instruction
  else
    i.address = offset + (has_base ? register_of(context, base | low) : 0);
  return has_sib;
}

// Returns whether the bytes at the instruction pointer are one of the instructions.
bool decode(const ucontext_t *context, Instruction &i) {
  const uint8_t *at = i.at = (const uint8_t *)context->uc_mcontext.gregs[REG_RIP];
  if (at[0] != 0xc4 || (at[1] & 0x1f) != 2) return false; // three-byte VEX, map 0F38
  bool is_wide = at[2] & 0x80, is_long = at[2] & 4, is_memory = at[4] < 0xc0;
  int reg = (at[1] & 0x80 ? 0 : 8) | (at[4] >> 3 & 7), rm = (at[1] & 0x20 ? 0 : 8) | (at[4] & 7);
  int index = at[1] & 0x40 ? 0 : 8, other = ~(at[2] >> 3) & 15, prefix = at[2] & 3; // none, 66, F3, F2
  if (is_wide || is_long) return false;
  if (at[3] == 0x49 && is_memory && reg == 0 && other == 0 && prefix <= 1) {
    i.operation = prefix ? kStoreConfig : kLoadConfig;
  } else if (at[3] == 0x49 && at[4] == 0xc0 && other == 0 && prefix == 0) {
    i.operation = kRelease;
  } else if (at[3] == 0x49 && !is_memory && (at[4] & 7) == 0 && other == 0 && prefix == 3) {
    i.operation = kZero, i.tile = reg;
  } else if (at[3] == 0x4b && is_memory && other == 0 && prefix != 0) { // with 66 it is TILELOADDT1
    i.operation = prefix == 2 ? kStore : kLoad, i.tile = reg;
  } else if ((at[3] == 0x5c && !is_memory && prefix == 2) || (at[3] == 0x5e && !is_memory && prefix == 3)) {
    i.operation = at[3] == 0x5c ? kMultiply : kMultiplyBytes, i.tile = reg, i.inputs = rm, i.columns = other;
    return true;
  } else {
    return false;
  }
  if (is_memory && !locate(context, rm & 8, index, i) && at[3] == 0x4b) fail(i, "#UD", "no SIB byte");
  return true;
}

// Loads the configuration of LDTILECFG.
Config loaded(const Instruction &i) {
  Config wanted;
  std::memcpy(&wanted, (const void *)i.address, sizeof wanted);
  if (wanted.palette == 0) return Config{};
  if (wanted.palette != 1) fail(i, "#GP", "palette %d", wanted.palette);
  for (int k = 0; k < 14; k++)
    if (wanted.reserved[k]) fail(i, "#GP", "byte %d is reserved", 2 + k);
  for (int k = 0; k < 8; k++)
    if (wanted.reserved_bytes[k] || wanted.reserved_rows[k]) fail(i, "#GP", "tile %d is reserved", 8 + k);
  for (int t = 0; t < kTiles; t++)
    if (wanted.bytes[t] > kBytes || wanted.rows[t] > kRows || !wanted.bytes[t] != !wanted.rows[t])
      fail(i, "#GP", "tile %d has %d rows of %d bytes", t, wanted.rows[t], wanted.bytes[t]);
  return wanted;
}

void configure(State &s, const Config &config) {
  s.config = config;
  std::memset(s.tiles, 0, sizeof s.tiles);
}

// Returns the configuration in the interrupted program's registers, or null if the processor has none and reports all
// instructions.
Config *saved_config(const ucontext_t *context, State &s) {
#ifdef AMX_STAND_IN
  return &s.stand_in;
#endif
  constexpr uint64_t kTileConfig = 1 << 17; // state component XTILECFG
  auto *registers = (char *)context->uc_mcontext.fpregs;
  _fpx_sw_bytes format;
  std::memcpy(&format, registers + 464, sizeof format); // the kernel's description of what it saved
  if (format.magic1 != FP_XSTATE_MAGIC1 || !(format.xstate_bv & kTileConfig)) return nullptr;
  uint64_t in_use;
  std::memcpy(&in_use, registers + 512, sizeof in_use); // XSTATE_BV
  return in_use & kTileConfig ? (Config *)(registers + saved_at) : &(s.stand_in = Config{});
}

// Adopts the processor's changes of its configuration since this thread's last emulated instruction.
void follow(State &s, Config &processor, bool is_new) {
  if (processor.palette == 0) return configure(s, Config{});
  if (processor.start_row == kKnown && !is_new) return;
  configure(s, processor);
  if (s.config.start_row == kKnown) s.config.start_row = 0; // a new thread starts with its parent's registers
  processor.start_row = kKnown;
}

void need(const State &s, const Instruction &i, int tile) {
  if (s.config.palette == 0) fail(i, "#UD", "no tiles are configured");
  if (tile >= kTiles || s.config.rows[tile] == 0) fail(i, "#UD", "tile %d is not configured", tile);
  if (i.operation != kZero && s.config.bytes[tile] % 4) fail(i, "#UD", "rows of %d bytes", s.config.bytes[tile]);
}

void load(State &s, const Instruction &i) {
  if (s.config.start_row >= s.config.rows[i.tile]) fail(i, "#UD", "begins at row %d", s.config.start_row);
  std::memset(s.tiles[i.tile][s.config.start_row], 0, (kRows - s.config.start_row) * kBytes);
  for (int r = s.config.start_row; r < s.config.rows[i.tile]; r++)
    std::memcpy(s.tiles[i.tile][r], (const char *)i.address + r * i.stride, s.config.bytes[i.tile]);
}

void store(const State &s, const Instruction &i) {
  if (s.config.start_row >= s.config.rows[i.tile]) fail(i, "#UD", "begins at row %d", s.config.start_row);
  for (int r = s.config.start_row; r < s.config.rows[i.tile]; r++)
    std::memcpy((char *)i.address + r * i.stride, s.tiles[i.tile][r], s.config.bytes[i.tile]);
}

// Rounds to nearest and flushes denormal inputs and results to zero: the caller's mode.
__attribute__((noinline)) void multiply(State &s, const Instruction &i) {
  float sums[kBytes / 4][2], total[kBytes / 4];
  uint16_t inputs[kBytes / 2], columns[kBytes / 2];
  auto number = [](uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  };
  int width = s.config.bytes[i.tile] / 4;
  for (int m = 0; m < s.config.rows[i.tile]; m++) {
    std::memset(sums, 0, sizeof sums);
    std::memcpy(inputs, s.tiles[i.inputs][m], kBytes);
    for (int k = 0; k < s.config.bytes[i.inputs] / 4; k++) {
      std::memcpy(columns, s.tiles[i.columns][k], kBytes);
      for (int n = 0; n < width; n++)
        for (int half = 0; half < 2; half++)
          sums[n][half] =
              __builtin_fmaf(number(inputs[2 * k + half]), number(columns[2 * n + half]), sums[n][half]);
    }
    std::memcpy(total, s.tiles[i.tile][m], kBytes);
    for (int n = 0; n < width; n++) total[n] += sums[n][0] + sums[n][1];
    std::memset(s.tiles[i.tile][m], 0, kBytes);
    std::memcpy(s.tiles[i.tile][m], total, 4 * width);
  }
  std::memset(s.tiles[i.tile][s.config.rows[i.tile]], 0, (kRows - s.config.rows[i.tile]) * kBytes);
}

void multiply_bytes(State &s, const Instruction &i) {
  int width = s.config.bytes[i.tile] / 4;
  for (int m = 0; m < s.config.rows[i.tile]; m++) {
    int32_t total[kBytes / 4];
    std::memcpy(total, s.tiles[i.tile][m], kBytes);
    for (int k = 0; k < s.config.bytes[i.inputs]; k++)
      for (int n = 0; n < width; n++)
        total[n] += (int8_t)s.tiles[i.inputs][m][k] * (int8_t)s.tiles[i.columns][k / 4][4 * n + k % 4];
    std::memcpy(s.tiles[i.tile][m], total, 4 * width);
  }
}

void check_product(const State &s, const Instruction &i) {
  const uint8_t *rows = s.config.rows;
  const uint16_t *bytes = s.config.bytes;
  if (i.tile == i.inputs || i.tile == i.columns || i.inputs == i.columns) fail(i, "#UD", "one tile twice");
  for (int tile : {i.tile, i.inputs, i.columns}) need(s, i, tile);
  if (rows[i.tile] != rows[i.inputs] || bytes[i.tile] != bytes[i.columns] || bytes[i.inputs] / 4 != rows[i.columns])
    fail(i, "#UD", "[%d][%d bytes] += [%d][%d] x [%d][%d]", rows[i.tile], bytes[i.tile], rows[i.inputs],
         bytes[i.inputs], rows[i.columns], bytes[i.columns]);
}

void carry_out(State &s, const Instruction &i) {
  switch (i.operation) {
  case kLoadConfig: return configure(s, loaded(i));
  case kStoreConfig: return (void)std::memcpy((void *)i.address, &s.config, sizeof s.config);
  case kRelease: return configure(s, Config{});
  case kZero:
    need(s, i, i.tile);
    std::memset(s.tiles[i.tile], 0, sizeof s.tiles[i.tile]);
    break;
  case kLoad:
    need(s, i, i.tile);
    load(s, i);
    break;
  case kStore:
    need(s, i, i.tile);
    store(s, i);
    break;
  case kMultiply:
    check_product(s, i);
    _mm_setcsr(0x9fc0); // round to nearest, flush denormals, no exceptions; the signal's return restores it
    multiply(s, i);
    products.fetch_add(1, std::memory_order_relaxed);
    break;
  case kMultiplyBytes:
    check_product(s, i);
    multiply_bytes(s, i);
    products.fetch_add(1, std::memory_order_relaxed);
  }
  s.config.start_row = 0;
}

void handle(int, siginfo_t *, void *context) {
  auto *here = (ucontext_t *)context;
  Instruction i{};
  if (!decode(here, i)) { // not an AMX instruction: as without this handler
    sigaction(SIGILL, &before, nullptr);
    return;
  }
  bool is_new = own == nullptr;
  if (is_new) {
    int index = threads.fetch_add(1);
    if (index >= kMostThreads) fail(i, "emulator", "more than %d threads", kMostThreads);
    own = &states[index];
  }
  Config *processor = saved_config(here, *own);
  if (processor && i.operation <= kRelease) { // executed by a processor with AMX itself
    if (i.operation == kStoreConfig) std::memcpy((void *)i.address, processor, sizeof *processor);
    else *processor = i.operation == kLoadConfig ? loaded(i) : Config{};
  } else {
    if (processor) follow(*own, *processor, is_new);
    carry_out(*own, i);
  }
  here->uc_mcontext.gregs[REG_RIP] += i.length;
}

__attribute__((constructor)) void begin() {
  unsigned size, unused;
  __cpuid_count(0xd, 17, size, saved_at, unused, unused);
  struct sigaction action {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, &before);
}

} // namespace

extern "C" {

// Replaces the C library's: a request for tiles succeeds without asking the kernel, which could grant it.
long syscall(long number, ...) noexcept {
  va_list values;
  va_start(values, number);
  long a = va_arg(values, long), b = va_arg(values, long), c = va_arg(values, long);
  register long d asm("r10") = va_arg(values, long);
  register long e asm("r8") = va_arg(values, long);
  register long f asm("r9") = va_arg(values, long);
  va_end(values);
  if (number == SYS_arch_prctl && a == 0x1023 && b == 18) return 0; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  long result;
  asm volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(d), "r"(e), "r"(f) : "rcx", "r11", "memory");
  if (result >= 0 || result < -4095) return result;
  errno = (int)-result;
  return -1;
}

// Number of products so far.
int64_t amx_emulator_products() { return products; }

// Number of threads that used tiles so far, and of those with tiles configured now. A processor with AMX releases tiles
// without the emulator's knowledge, so that the second number is meaningless there.
int64_t amx_emulator_threads() { return threads; }

int64_t amx_emulator_configured() {
  int64_t count = 0;
  for (const State &s : states) count += s.config.palette != 0;
  return count;
}
}
