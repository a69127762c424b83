/* Finds the requests of a step that share tiles of keys, so that these are read and converted once for the rows of all of them
 * ("cascade attention": Ye et al. 2025, "FlashInfer", section 3.1; here with the same bits as without).
 *
 * Requests with the same leading block ids in their tables share what is in these blocks. Sorted by their tables, those that share
 * the most are neighbours, and what a request shares with any other is what its neighbours between them share. A tile is shared if
 * all rows see all of it, so it is computed for a row as in the row's own task: what comes before and after it is the same. */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

/* The most query tokens of a request that shares; those of longer pieces of prompts share tiles with one another anyway. */
enum { MOST_TOKENS = 8 };
/* How many requests' rows take as long to compute as a tile takes to read and convert. */
enum { TILE_COST = 4 };

struct candidate {
    const int32_t *table;
    int64_t blocks, tiles; /* tiles: how many are seen by all its rows; blocks: how many these are in */
    int32_t seq, tokens;
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int compare(const void *one, const void *other) {
    const struct candidate *a = one, *b = other;
    int order = memcmp(a->table, b->table, (size_t)least(a->blocks, b->blocks) * sizeof *a->table);
    if (order != 0) return order;
    if (a->tiles != b->tiles) return a->tiles < b->tiles ? -1 : 1;
    return a->seq < b->seq ? -1 : 1;
}

/* Requests whose rows may share, sorted. In layers with a window these see all keys, since blocks before a window may be gone. */
static int64_t find_candidates(struct candidate *found, const struct attention_call *call) {
    int64_t count = 0, group = call->heads / call->kv_heads;
    for (int64_t seq = 0; seq < call->num_seqs; seq++) {
        int64_t tokens = call->query_start[seq + 1] - call->query_start[seq], length = call->seq_lens[seq];
        int64_t tiles = (length - tokens + 1) / KEY_TILE;
        if (tokens < 1 || tokens > MOST_TOKENS || 2 * tokens * group > ATTENTION_ROWS || tiles == 0) continue;
        if (call->ahead > 0 || (call->window > 0 && length > call->window)) continue;
        found[count++] = (struct candidate){
            .table = call->block_tables + seq * call->table_stride,
            .blocks = (tiles * KEY_TILE - 1) / call->block_size + 1,
            .tiles = tiles,
            .seq = (int32_t)seq,
            .tokens = (int32_t)tokens,
        };
    }
    qsort(found, (size_t)count, sizeof *found, compare);
    return count;
}

static int64_t tiles_in_common(const struct attention_call *call, const struct candidate *a, const struct candidate *b) {
    int64_t most = least(a->blocks, b->blocks), blocks = 0;
    while (blocks < most && a->table[blocks] == b->table[blocks]) blocks++;
    return least(blocks * call->block_size / KEY_TILE, least(a->tiles, b->tiles));
}

/* Into how many parts a group of members is cut: more parts may keep more threads busy, but each reads and converts the tiles. */
static int64_t parts_of(const struct attention_call *call, const struct sharing_member *members, int64_t count, int n_threads) {
    int64_t tokens = 1, best = 0, least_time = INT64_MAX;
    for (int64_t i = 0; i < count; i++) tokens = members[i].tokens > tokens ? members[i].tokens : tokens;
    int64_t together = ATTENTION_ROWS / (tokens * (call->heads / call->kv_heads)), fewest = (count + together - 1) / together;
    for (int64_t parts = fewest; parts <= fewest || parts <= count / 2; parts++) {
        int64_t rounds = (call->kv_heads * parts + n_threads - 1) / n_threads, time = rounds * (TILE_COST + (count + parts - 1) / parts);
        if (time < least_time) {
            least_time = time;
            best = parts;
        }
    }
    return best;
}

/* Appends the tasks of a group of members, and notes how many tiles each of them attends to in these. */
static void plan_group(struct sharing *to, const struct attention_call *call, int64_t first, int64_t count, int n_threads) {
    int64_t parts = parts_of(call, to->members + first, count, n_threads);
    for (int64_t part = 0; part < parts; part++) {
        int64_t begin = first + count * part / parts, end = first + count * (part + 1) / parts;
        to->members[end - 1].tiles = 0;
        for (int64_t i = begin; i < end; i++) {
            int32_t before = i > begin ? to->members[i - 1].tiles : 0, after = to->members[i].tiles;
            to->tiles[to->members[i].seq] = before > after ? before : after;
        }
        for (int64_t kv_head = 0; kv_head < call->kv_heads && end - begin > 1; kv_head++)
            to->tasks[to->count++] = (struct sharing_task){(int32_t)begin, (int32_t)end, (int32_t)kv_head};
    }
}

/* Makes the candidates members, and plans the tasks of each group of them; *rows becomes the number of their query rows. */
static void plan_tasks(struct sharing *to, const struct attention_call *call, const struct candidate *candidates, int64_t count,
                       int n_threads, size_t *rows) {
    *rows = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t tiles = i + 1 < count ? tiles_in_common(call, &candidates[i], &candidates[i + 1]) : 0;
        to->members[i] = (struct sharing_member){candidates[i].seq, candidates[i].tokens, (int32_t)tiles};
    }
    for (int64_t first = 0, end; first < count; first = end) {
        for (end = first + 1; to->members[end - 1].tiles > 0;) end++;
        if (end - first > 1) plan_group(to, call, first, end - first, n_threads);
    }
    for (int64_t i = 0; i < count; i++) {
        const struct candidate *one = &candidates[i];
        if (to->tiles[one->seq] == 0) continue;
        to->place[one->seq] = (int32_t)*rows;
        *rows += (size_t)one->tokens;
    }
}

void free_sharing(struct sharing *sharing) {
    if (sharing == NULL) return;
    free(sharing->tasks);
    free(sharing->members);
    free(sharing->tiles);
    free(sharing->place);
    free(sharing->states);
    free(sharing);
}

int find_sharing(struct sharing **found, const struct attention_call *call, int n_threads) {
    *found = NULL;
    if (call->num_seqs < 2) return STATUS_OK;
    struct candidate *candidates = malloc((size_t)call->num_seqs * sizeof *candidates);
    if (candidates == NULL) return STATUS_NO_MEMORY;
    int64_t count = find_candidates(candidates, call), i = 1;
    while (i < count && tiles_in_common(call, &candidates[i - 1], &candidates[i]) == 0) i++;
    if (i >= count) {
        free(candidates);
        return STATUS_OK;
    }
    size_t seqs = (size_t)call->num_seqs, rows = 0;
    struct sharing *to = calloc(1, sizeof *to);
    int ready = to != NULL && (to->tasks = malloc(seqs * (size_t)call->kv_heads * sizeof *to->tasks)) != NULL &&
                (to->members = malloc(seqs * sizeof *to->members)) != NULL && (to->tiles = calloc(seqs, sizeof *to->tiles)) != NULL &&
                (to->place = calloc(seqs, sizeof *to->place)) != NULL;
    if (ready) {
        plan_tasks(to, call, candidates, count, n_threads, &rows);
        size_t bytes = rows * (size_t)call->heads * state_floats(call->value_dim) * sizeof *to->states;
        ready = (to->states = aligned_alloc(64, bytes)) != NULL;
    }
    free(candidates);
    *found = to;
    return ready ? STATUS_OK : STATUS_NO_MEMORY;
}

/* Writes how many tiles each request of a checked call attends to in shared tasks: [num_seqs]. For tests, since no result of
 * attention shows it. */
int baton_shared_tiles(const struct attention_call *call, int n_threads, int32_t *tiles) {
    struct sharing *sharing;
    int status = find_sharing(&sharing, call, n_threads);
    memset(tiles, 0, (size_t)call->num_seqs * sizeof *tiles);
    if (status == STATUS_OK && sharing != NULL) memcpy(tiles, sharing->tiles, (size_t)call->num_seqs * sizeof *tiles);
    free_sharing(sharing);
    return status;
}
