/* AMX's tile instructions in plain C, for processors without them. Included before amx.c and amx_int8.c, whose intrinsics these
 * take the place of; one source defines EMULATED_TILES_HERE and so has the tiles.
 *
 * What the instructions refuse is counted in emulated_tile_faults, and does nothing. emulated_tile_rows counts the rows of all
 * products of tiles. tdpbf16ps sums the even and the odd elements in a chain each, as the instruction does, but keeps subnormal
 * numbers, which that takes as zero. */
#include <cpuid.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

struct emulated_tiles {
    int configured;
    struct {
        int rows, bytes;
        uint8_t data[16][64];
    } tile[8];
};

#ifdef EMULATED_TILES_HERE
_Thread_local struct emulated_tiles emulated_tiles;
int emulated_tile_faults, emulated_tile_rows;
#else
extern _Thread_local struct emulated_tiles emulated_tiles;
extern int emulated_tile_faults, emulated_tile_rows;
#endif

/* Whether something that an instruction demands holds. */
static inline int emulated_demand(int holds) {
    if (!holds) emulated_tile_faults++;
    return holds;
}

static inline void emulated_loadconfig(const void *from) {
    const uint8_t *config = from;
    memset(&emulated_tiles, 0, sizeof emulated_tiles);
    if (!emulated_demand(config[0] == 1)) return;
    emulated_tiles.configured = 1;
    for (int i = 0; i < 16; i++) {
        uint16_t bytes;
        memcpy(&bytes, config + 16 + 2 * i, sizeof bytes);
        if (i >= 8) {
            emulated_demand(bytes == 0 && config[48 + i] == 0);
            continue;
        }
        if (!emulated_demand(bytes <= 64 && config[48 + i] <= 16)) bytes = 0;
        emulated_tiles.tile[i].rows = config[48 + i];
        emulated_tiles.tile[i].bytes = bytes;
    }
    for (int i = 1; i < 16; i++) emulated_demand(config[i] == 0);
}

static inline void emulated_release(void) { memset(&emulated_tiles, 0, sizeof emulated_tiles); }

static inline int emulated_usable(int i) {
    return emulated_demand(emulated_tiles.configured && emulated_tiles.tile[i].rows > 0 && emulated_tiles.tile[i].bytes > 0);
}

static inline void emulated_zero(int i) {
    if (emulated_usable(i)) memset(emulated_tiles.tile[i].data, 0, sizeof emulated_tiles.tile[i].data);
}

static inline void emulated_loadd(int i, const void *from, size_t stride) {
    if (!emulated_usable(i)) return;
    memset(emulated_tiles.tile[i].data, 0, sizeof emulated_tiles.tile[i].data);
    for (int row = 0; row < emulated_tiles.tile[i].rows; row++)
        memcpy(emulated_tiles.tile[i].data[row], (const char *)from + (size_t)row * stride, (size_t)emulated_tiles.tile[i].bytes);
}

static inline void emulated_stored(int i, void *to, size_t stride) {
    if (!emulated_usable(i)) return;
    for (int row = 0; row < emulated_tiles.tile[i].rows; row++)
        memcpy((char *)to + (size_t)row * stride, emulated_tiles.tile[i].data[row], (size_t)emulated_tiles.tile[i].bytes);
}

/* Whether tiles a and b can be multiplied into c. */
static inline int emulated_fits(int c, int a, int b) {
    emulated_tile_rows += emulated_tiles.tile[c].rows;
    return emulated_usable(c) && emulated_usable(a) && emulated_usable(b) && emulated_demand(c != a && c != b && a != b) &&
           emulated_demand(emulated_tiles.tile[c].rows == emulated_tiles.tile[a].rows &&
                           emulated_tiles.tile[c].bytes == emulated_tiles.tile[b].bytes &&
                           emulated_tiles.tile[a].bytes == 4 * emulated_tiles.tile[b].rows);
}

static inline void emulated_dpb(int c, int a, int b, int b_is_signed) {
    if (!emulated_fits(c, a, b)) return;
    for (int row = 0; row < emulated_tiles.tile[c].rows; row++)
        for (int column = 0; column < emulated_tiles.tile[c].bytes / 4; column++) {
            uint8_t *at = emulated_tiles.tile[c].data[row] + 4 * column;
            int32_t sum;
            memcpy(&sum, at, 4);
            for (int k = 0; k < emulated_tiles.tile[a].bytes; k++) {
                const uint8_t x = emulated_tiles.tile[a].data[row][k], w = emulated_tiles.tile[b].data[k / 4][4 * column + k % 4];
                sum += (int8_t)x * (b_is_signed ? (int8_t)w : w);
            }
            memcpy(at, &sum, 4);
        }
}

static inline float emulated_bf16(const uint8_t *at) {
    uint32_t bits = (uint32_t)at[0] << 16 | (uint32_t)at[1] << 24;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

static inline void emulated_dpbf16ps(int c, int a, int b) {
    if (!emulated_fits(c, a, b)) return;
    for (int row = 0; row < emulated_tiles.tile[c].rows; row++)
        for (int column = 0; column < emulated_tiles.tile[c].bytes / 4; column++) {
            uint8_t *at = emulated_tiles.tile[c].data[row] + 4 * column;
            float before, sums[2] = {0, 0};
            memcpy(&before, at, 4);
            for (int k = 0; k < emulated_tiles.tile[a].bytes; k += 2)
                sums[k / 2 % 2] = fmaf(emulated_bf16(&emulated_tiles.tile[a].data[row][k]),
                                       emulated_bf16(&emulated_tiles.tile[b].data[k / 4][4 * column + k % 4]), sums[k / 2 % 2]);
            before += sums[0] + sums[1];
            memcpy(at, &before, 4);
        }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_zero emulated_zero
#define _tile_dpbf16ps emulated_dpbf16ps
#define _tile_dpbssd(c, a, b) emulated_dpb(c, a, b, 1)
#define _tile_dpbsud(c, a, b) emulated_dpb(c, a, b, 0)

/* The processor and Linux say that there are tiles. */
#define __get_cpuid_count(leaf, subleaf, a, b, c, d) (*(a) = *(b) = *(c) = *(d) = ~0u, 1)
#define syscall(...) 0
