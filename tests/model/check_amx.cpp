// Tests of single AMX instructions. `check_amx results` prints "ok" or the line that is wrong. Every other argument
// names a fault, which terminates the process. Expected results are computed by hand from the manual's rules. The
// instructions run on the processor, or in amx_emulator.cpp if it is linked.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

#include <sys/syscall.h>
#include <unistd.h>

namespace {

struct alignas(64) Shapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

void configure(const Shapes &shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
Shapes configuration() {
  Shapes shapes;
  asm volatile("sttilecfg %0" : "=m"(shapes));
  return shapes;
}
void release() { asm volatile("tilerelease" ::: "memory"); }
template <typename T> void load(const T *from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm0" ::"r"(from), "r"(stride) : "memory");
}
void store(void *to, int64_t stride) {
  asm volatile("tilestored %%tmm0, (%0,%1,1)" ::"r"(to), "r"(stride) : "memory");
}
void multiply() { asm volatile("tdpbf16ps %%tmm2, %%tmm1, %%tmm0" ::); }

#define EXPECT(what)                                                                                                   \
  if (!(what)) return __LINE__

// Configures tiles 0 to `count` - 1 with these rows and bytes.
Shapes shaped(int count, int rows, int bytes) {
  Shapes shapes;
  for (int t = 0; t < count; t++) shapes.rows[t] = rows, shapes.bytes[t] = bytes;
  return shapes;
}

int memory() {
  static const Shapes shapes = shaped(2, 3, 8);
  asm volatile("ldtilecfg %0" ::"m"(shapes)); // relative to the instruction pointer
  Shapes stored = configuration();
  EXPECT(!std::memcmp(&stored, &shapes, sizeof shapes));
  int32_t from[64], to[64], zeros[64] = {};
  for (int i = 0; i < 64; i++) from[i] = i + 1, to[i] = -1;
  store(to, 16); // configuring zeroes tiles
  EXPECT(to[0] == 0 && to[1] == 0 && to[2] == -1 && to[4] == 0 && to[9] == 0 && to[10] == -1 && to[12] == -1);
  load(from, 20);
  store(to + 32, 8);
  const int32_t rows[] = {1, 2, 6, 7, 11, 12, -1};
  EXPECT(!std::memcmp(to + 32, rows, sizeof rows));
  // A base and an index of the upper eight registers, scales, and displacements of one and four bytes.
  asm volatile("mov %0, %%r13\nmov $-8, %%r12\ntileloadd 64(%%r13,%%r12,4), %%tmm1\n"
               "lea 1024(%1), %%r13\nmov $4, %%r12\ntilestored %%tmm1, -1024(%%r13,%%r12,2)" ::"r"(from), "r"(to)
               : "r12", "r13", "memory");
  const int32_t down[] = {17, 18, 9, 10, 1, 2};
  EXPECT(!std::memcmp(to, down, 6 * 4));
  asm volatile("tilezero %%tmm1\ntilestored %%tmm1, (%0,%1,2)" ::"r"(to), "r"(4ll) : "memory");
  EXPECT(!std::memcmp(to, zeros, 6 * 4));
  configure(shapes);
  store(to + 32, 8); // and drops previous contents
  EXPECT(!std::memcmp(to + 32, zeros, 6 * 4));
  release();
  stored = configuration();
  EXPECT(!std::memcmp(&stored, zeros, sizeof stored));
  return 0;
}

uint16_t bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits >> 16;
}

int arithmetic() {
  configure(shaped(3, 2, 8));
  const float big = 0x1p24f, least = 0x1p-126f;
  // Two rows of two pairs, and two pairs of two columns, of which the second column is denormal.
  const float rows[2][4] = {{big, -big, 1, 1}, {2 * least, 0, -1.5f * least, 0}};
  uint16_t inputs[2][4], columns[2][4];
  for (int r = 0; r < 2; r++)
    for (int i = 0; i < 4; i++) inputs[r][i] = bfloat16(rows[r][i]), columns[r][i] = i < 2 ? bfloat16(1) : 1;
  const uint32_t sums[2][2] = {{0x3f000000, 0x00000001}, {0, 0x3f800000}}; // 0.5 and the minimum denormal; 0 and 1
  asm volatile("tileloadd (%0,%2,1), %%tmm1\ntileloadd (%1,%2,1), %%tmm2" ::"r"(inputs), "r"(columns), "r"(8ll) : "memory");
  load(sums, 8);
  multiply();
  uint32_t results[2][2];
  store(results, 8);
  release();
  // The even sum is 2^24 + 1, rounded to 2^24; the odd one is 1 - 2^24. Together they are 1.
  EXPECT(results[0][0] == 0x3fc00000); // 1.5
  EXPECT(results[0][1] == 0);          // denormal inputs
  EXPECT(results[1][0] == 0);          // denormal result
  EXPECT(results[1][1] == 0x3f800000);
  return 0;
}

int fault(const std::string &what) {
  Shapes shapes = shaped(3, 4, 16);
  int32_t memory[64] = {};
  if (what == "reserved") shapes.reserved[13] = 1;
  if (what == "tile 8") shapes.rows[8] = 4;
  if (what == "rows") shapes.rows[1] = 17;
  if (what == "bytes") shapes.bytes[1] = 65;
  if (what == "half a tile") shapes.rows[1] = 0;
  if (what == "palette") shapes.palette = 2;
  if (what == "shapes") shapes.rows[1] = 5;
  if (what == "columns") shapes.bytes[2] = 12;
  if (what == "pairs") shapes.rows[2] = 5;
  if (what == "start") shapes.start = 4;
  if (what != "load" && what != "zero") configure(shapes);
  if (what == "zero") asm volatile("tilezero %%tmm0" ::);
  if (what == "tile 3") asm volatile("tilezero %%tmm3" ::);
  if (what == "twice") asm volatile(".byte 0xc4, 0xe2, 0x72, 0x5c, 0xc1" ::); // tdpbf16ps %tmm1, %tmm1, %tmm0
  if (what == "release") release();
  if (what == "load" || what == "start") load(memory, 16);
  if (what == "release") store(memory, 16);
  multiply();
  return 1;
}

} // namespace

int main(int, char **arguments) {
  std::string what = arguments[1];
  if (syscall(SYS_arch_prctl, 0x1023, 18)) return std::puts("the kernel gives no permission to use tiles"), 2;
  if (what != "results") return fault(what);
  int line = memory();
  if (!line) line = arithmetic();
  line ? std::printf("line %d\n", line) : std::puts("ok");
  return line != 0;
}
