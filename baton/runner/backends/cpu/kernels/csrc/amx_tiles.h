/* What amx.c and amx_int8.c share. Either releases the tiles at the end of each task, so that neither meets the other's. */
#ifndef BATON_AMX_TILES_H
#define BATON_AMX_TILES_H

#include <stdint.h>

/* What ldtilecfg reads. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* Some compilers' tile intrinsics don't declare which memory they read: this makes them write what p points to before it. */
#define WRITTEN(p) __asm__ volatile("" : : "r"(p) : "memory")

#endif
