/* libcufile.so.0 without a GPU: the calls and structures of cufile.h (1.15), reading real files into
   host memory by threads of its own, for the real bindings to be run on.

   A program may hold several worlds (`standin_begin`), each with a driver, files, memory and batches
   of its own; `standin_enter` says which one the calling thread's next call is made in, how it is set,
   and what that call fails with. `standin_faults` says what becomes of the entries of its next
   submission. What a caller must not do is noted (`standin_violations`) and goes on. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

/* --- cufile.h */

typedef struct { int err, cu_err; } CUfileError_t;
typedef void *CUfileHandle_t, *CUfileBatchHandle_t;

enum {
  DRIVER_NOT_INITIALIZED = 5001,
  IO_NOT_SUPPORTED = 5008,
  NVFS_DRIVER_ERROR = 5010,
  INVALID_VALUE = 5022,
  DRIVER_ALREADY_OPEN = 5026,
  HANDLE_NOT_REGISTERED = 5027,
  GPU_MEMORY_PINNING_FAILED = 5036,
  BATCH_FULL = 5037,
  INTERNAL_BATCH_SETUP_ERROR = 5039,
  INTERNAL_BATCH_GETSTATUS_ERROR = 5041,
  IO_ERROR = 5044,
  INVALID_CONTEXT_ERROR = 5047,
};
enum { PENDING = 2, CANCELED = 8, COMPLETE = 16, FAILED = 64 };

typedef struct {
  struct {
    unsigned major_version, minor_version;
    size_t poll_thresh_size, max_direct_io_size;
    unsigned dstatusflags, dcontrolflags;
  } nvfs;
  unsigned fflags, max_device_cache_size, per_buffer_cache_size, max_device_pinned_mem_size;
  unsigned max_batch_io_size, max_batch_io_timeout_msecs;
} CUfileDrvProps_t;

typedef struct {
  int type;
  union { int fd; void *handle; } handle;
  const void *fs_ops;
} CUfileDescr_t;

typedef struct {
  int mode;
  union {
    struct {
      void *devPtr_base;
      off_t file_offset, devPtr_offset;
      size_t size;
    } batch;
  } u;
  CUfileHandle_t fh;
  int opcode;
  void *cookie;
} CUfileIOParams_t;

typedef struct {
  void *cookie;
  int status;
  size_t ret;
} CUfileIOEvents_t;

typedef struct { uint64_t ok, err; } CUfileOpCounter_t;

typedef struct {
  CUfileOpCounter_t read_ops, write_ops, hdl_register_ops, hdl_deregister_ops, buf_register_ops,
      buf_deregister_ops;
  uint64_t read_bytes, write_bytes, read_bw_bytes_per_sec, write_bw_bytes_per_sec, read_lat_avg_us,
      write_lat_avg_us, read_ops_per_sec, write_ops_per_sec, read_lat_sum_us, write_lat_sum_us;
  CUfileOpCounter_t batch_submit_ops, batch_complete_ops, batch_setup_ops, batch_cancel_ops,
      batch_destroy_ops, batch_enqueued_ops, batch_posix_enqueued_ops, batch_processed_ops,
      batch_posix_processed_ops, batch_nvfs_submit_ops, batch_p2p_submit_ops, batch_aio_submit_ops,
      batch_iouring_submit_ops, batch_mixed_io_submit_ops, batch_total_submit_ops;
  uint64_t of_batches[12];
  CUfileOpCounter_t readv_ops, writev_ops;
  uint64_t of_vectors[10];
} CUfileStatsLevel1_t;

/* --- what stands in */

enum { NONE, ERROR, STATUS, SHORT, NEVER, LATE, TWICE, FLIP, HOLD };
enum { FIFO, LIFO, RANDOM };
enum { WORKS, REFUSED, STALE };

typedef struct {
  int32_t direct, driver, force_compat, mixed, batches, batch_bit, few_is_error, counts_opens;
  int32_t p2p;
  int32_t register_fails, open_hangs, max_batch, order, delay_us, after_cancel;
} Settings;

typedef struct { int32_t kind; int64_t value; } Fault;

typedef struct File {
  struct File *next;
  int fd;
} File;

typedef struct Region {
  struct Region *next;
  const char *base;
  size_t size;
  bool registered;
} Region;

typedef struct Batch Batch;
typedef struct Entry {
  struct Entry *next;
  Batch *batch;
  const CUfileIOParams_t *params; /* the caller's, looked at again when the read is made */
  CUfileIOParams_t copy;
  Fault fault;
  int polls_left, reports, status;
  int64_t ret;
  bool begun, done, over; /* done: the bytes are there; over: and reported */
  bool is_call;           /* made by the thread that asks for it */
} Entry;

struct Batch {
  Batch *next;
  unsigned capacity;
  bool cancelled, stale;
  Entry *entries; /* in the order of submission; of those that are done, in that of completion */
};

typedef struct {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  Settings set;
  uint64_t random;
  int users, stats_level;
  bool allow_compat, ending;
  uint64_t direct_count, host_count;
  File *files;
  Region *regions;
  Batch *batches;
  pthread_t threads[4];
  int n_threads;
  char violations[4096];
} World;

static _Thread_local World *world;
static _Thread_local int fail_code;
static _Thread_local const Fault *next_faults;
static _Thread_local unsigned n_next_faults;

static void note(World *w, const char *format, ...) {
  size_t used = strlen(w->violations);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(w->violations + used, sizeof w->violations - used, format, arguments);
  va_end(arguments);
  used = strlen(w->violations);
  snprintf(w->violations + used, sizeof w->violations - used, "\n");
}

static uint64_t draw(World *w, uint64_t below) {
  w->random ^= w->random << 13, w->random ^= w->random >> 7, w->random ^= w->random << 17;
  return below ? w->random % below : 0;
}

static CUfileError_t with(int code) { return (CUfileError_t){code, 0}; }

static int failing(void) {
  int code = fail_code;
  fail_code = 0;
  return code;
}

static bool unfinished(const Entry *e) { return !e->over; }

/* Whether an entry that is not over reads from the file, or into the range. */
static bool in_use(World *w, const File *file, const char *base, size_t size) {
  for (Batch *b = w->batches; b; b = b->next)
    for (Entry *e = b->entries; e; e = e->next) {
      const char *at = (const char *)e->copy.u.batch.devPtr_base + e->copy.u.batch.devPtr_offset;
      if (unfinished(e) && ((file && e->copy.fh == file) || (base && at >= base && at < base + size)))
        return true;
    }
  return false;
}

static File *file_of(World *w, CUfileHandle_t handle) {
  for (File *f = w->files; f; f = f->next)
    if (f == handle) return f;
  return NULL;
}

static char *target(World *w, void *base, off_t offset, size_t size) {
  for (Region *r = w->regions; r; r = r->next)
    if (r->base == base) {
      if (!r->registered && w->allow_compat) return (char *)base + offset;
      if (r->registered && offset >= 0 && (size_t)offset + size <= r->size)
        return (char *)base + offset;
    }
  note(w, "%zu bytes at %ld are not inside registered memory", size, (long)offset);
  return NULL;
}

/* The bytes of one read; -errno where it fails. The lock is given up meanwhile. */
static int64_t transfer(World *w, int fd, char *to, size_t size, off_t offset, Fault fault) {
  size_t wanted = fault.kind == SHORT && (size_t)fault.value < size ? (size_t)fault.value : size;
  int64_t moved = 0;
  pthread_mutex_unlock(&w->lock);
  while ((size_t)moved < wanted) {
    ssize_t got = pread(fd, to + moved, wanted - moved, offset + moved);
    if (got < 0) moved = -errno;
    if (got <= 0) break;
    moved += got;
  }
  if (fault.kind == FLIP && moved > 0)
    to[fault.value / 8 % moved] ^= (char)(1 << fault.value % 8);
  pthread_mutex_lock(&w->lock);
  bool direct = w->set.direct && !w->set.force_compat;
  w->direct_count += direct;
  w->host_count += w->set.mixed || !direct;
  return moved;
}

static bool parked(const Entry *e) {
  return e->fault.kind == NEVER || (e->fault.kind == HOLD && !e->batch->cancelled);
}

static Entry *choose(World *w) {
  Entry *found = NULL;
  unsigned seen = 0;
  for (Batch *b = w->batches; b; b = b->next)
    for (Entry *e = b->entries; e; e = e->next) {
      if (e->begun || e->is_call || parked(e)) continue;
      ++seen;
      if (!found || w->set.order == LIFO || (w->set.order == RANDOM && draw(w, seen) == 0)) found = e;
    }
  return found;
}

/* Moves an entry behind those of its batch that are done. */
static void put_last_done(Entry *entry) {
  Entry **at = &entry->batch->entries;
  while (*at != entry) at = &(*at)->next;
  *at = entry->next;
  for (at = &entry->batch->entries; *at && (*at)->done;) at = &(*at)->next;
  entry->next = *at;
  *at = entry;
}

static void perform(World *w, Entry *e) {
  e->begun = true;
  int delay_us = w->set.delay_us ? (int)draw(w, w->set.delay_us) : 0;
  if (delay_us) {
    pthread_mutex_unlock(&w->lock);
    usleep(delay_us);
    pthread_mutex_lock(&w->lock);
  }
  if (memcmp(e->params, &e->copy, sizeof e->copy) != 0)
    note(w, "the parameters of an entry changed before it was over");
  const CUfileIOParams_t *p = &e->copy;
  File *file = file_of(w, p->fh);
  e->status = COMPLETE;
  if (e->batch->stale || (e->batch->cancelled && e->fault.kind == HOLD)) {
    e->status = CANCELED;
  } else if (e->fault.kind == ERROR) {
    e->status = FAILED, e->ret = -e->fault.value;
  } else if (e->fault.kind == STATUS) {
    e->status = (int)e->fault.value, e->ret = (int64_t)p->u.batch.size; /* means nothing */
  } else {
    char *to = target(w, p->u.batch.devPtr_base, p->u.batch.devPtr_offset, p->u.batch.size);
    e->ret = file && to ? transfer(w, file->fd, to, p->u.batch.size, p->u.batch.file_offset, e->fault)
                        : -INVALID_VALUE;
    if (e->ret < 0) e->status = FAILED;
  }
  put_last_done(e);
  e->done = true;
  pthread_cond_broadcast(&w->changed);
}

static void *work(void *argument) {
  World *w = argument;
  pthread_mutex_lock(&w->lock);
  while (!w->ending) {
    Entry *e = choose(w);
    if (e)
      perform(w, e);
    else
      pthread_cond_wait(&w->changed, &w->lock);
  }
  pthread_mutex_unlock(&w->lock);
  return NULL;
}

/* --- control */

World *standin_begin(uint64_t seed) {
  World *w = calloc(1, sizeof *w);
  pthread_mutexattr_t recursive;
  pthread_mutexattr_init(&recursive);
  pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
  pthread_mutex_init(&w->lock, &recursive);
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&w->changed, &monotonic);
  w->random = seed * 0x9E3779B97F4A7C15u + 1;
  w->allow_compat = true;
  return w;
}

void standin_enter(World *w, const Settings *settings, int code) {
  world = w, fail_code = code;
  pthread_mutex_lock(&w->lock);
  w->set = *settings;
  pthread_mutex_unlock(&w->lock);
}

/* Of the calling thread's next read or submission; they stay the caller's until it has been made. */
void standin_faults(const Fault *faults, unsigned n) { next_faults = faults, n_next_faults = n; }

void standin_lock(World *w) { pthread_mutex_lock(&w->lock); }
void standin_unlock(World *w) { pthread_mutex_unlock(&w->lock); }

/* Lets go of everything that was held back. */
void standin_release(World *w) {
  pthread_mutex_lock(&w->lock);
  w->set.open_hangs = 0;
  for (Batch *b = w->batches; b; b = b->next)
    for (Entry *e = b->entries; e; e = e->next)
      if (!e->begun && (e->fault.kind == NEVER || e->fault.kind == HOLD)) e->fault.kind = NONE;
  pthread_cond_broadcast(&w->changed);
  pthread_mutex_unlock(&w->lock);
}

/* Another library's use of the driver. */
void standin_use(World *w, int users) {
  pthread_mutex_lock(&w->lock);
  w->users = users;
  pthread_mutex_unlock(&w->lock);
}

/* Of: 0 users of the driver, 1 files, 2 registered memory, 3 entries that are not over, 4 whether
   compatibility mode is allowed, 5 threads. */
int standin_count(World *w, int of) {
  int found = 0;
  pthread_mutex_lock(&w->lock);
  if (of == 0) found = w->users;
  for (File *f = w->files; of == 1 && f; f = f->next) ++found;
  for (Region *r = w->regions; of == 2 && r; r = r->next) found += r->registered;
  for (Batch *b = w->batches; of == 3 && b; b = b->next)
    for (Entry *e = b->entries; e; e = e->next) found += unfinished(e);
  if (of == 4) found = w->allow_compat;
  if (of == 5) found = w->n_threads;
  pthread_mutex_unlock(&w->lock);
  return found;
}

void standin_violations(World *w, char *text, size_t size) {
  pthread_mutex_lock(&w->lock);
  snprintf(text, size, "%s", w->violations);
  pthread_mutex_unlock(&w->lock);
}

static void stop_threads(World *w) {
  w->ending = true;
  pthread_cond_broadcast(&w->changed);
  while (w->n_threads > 0) {
    pthread_t thread = w->threads[--w->n_threads];
    pthread_mutex_unlock(&w->lock);
    pthread_join(thread, NULL);
    pthread_mutex_lock(&w->lock);
  }
  w->ending = false;
}

/* Ends the threads and frees what is left. No call of cuFile may be under way in it. */
void standin_end(World *w) {
  pthread_mutex_lock(&w->lock);
  stop_threads(w);
  pthread_mutex_unlock(&w->lock);
  for (Batch *b = w->batches, *next; b; b = next) {
    for (Entry *e = b->entries, *after; e; e = after) after = e->next, free(e);
    next = b->next, free(b);
  }
  for (File *f = w->files, *next; f; f = next) next = f->next, close(f->fd), free(f);
  for (Region *r = w->regions, *next; r; r = next) next = r->next, free(r);
  pthread_cond_destroy(&w->changed);
  pthread_mutex_destroy(&w->lock);
  free(w);
}

/* --- the driver */

CUfileError_t cuFileDriverOpen(void) {
  World *w = world;
  int code = failing();
  pthread_mutex_lock(&w->lock);
  while (w->set.open_hangs) pthread_cond_wait(&w->changed, &w->lock);
  if (!code && w->users && !w->set.counts_opens) code = DRIVER_ALREADY_OPEN;
  if (!code && !w->allow_compat && !w->set.direct) code = NVFS_DRIVER_ERROR;
  if (!code) ++w->users;
  pthread_mutex_unlock(&w->lock);
  return with(code);
}

CUfileError_t cuFileDriverClose(void) {
  World *w = world;
  if (fail_code) return with(failing());
  pthread_mutex_lock(&w->lock);
  bool busy = false;
  for (Batch *b = w->batches; b; b = b->next)
    for (Entry *e = b->entries; e; e = e->next) busy |= unfinished(e);
  if (busy) note(w, "driver closed under reads");
  int code = w->users > 0 ? 0 : DRIVER_NOT_INITIALIZED;
  if (!code && --w->users == 0) stop_threads(w);
  pthread_mutex_unlock(&w->lock);
  return with(code);
}

CUfileError_t cuFileDriverClose_v2(void) { return cuFileDriverClose(); }

long cuFileUseCount(void) { return standin_count(world, 0); }

CUfileError_t cuFileGetVersion(int *version) {
  *version = 1150;
  return with(0);
}

CUfileError_t cuFileDriverGetProperties(CUfileDrvProps_t *properties) {
  World *w = world;
  if (fail_code) return with(failing());
  memset(properties, 0, sizeof *properties);
  if (w->set.driver) properties->nvfs.major_version = 2, properties->nvfs.minor_version = 26;
  properties->nvfs.dstatusflags = (unsigned)w->set.p2p << 11;
  properties->nvfs.dcontrolflags = (unsigned)w->allow_compat << 1;
  properties->fflags = (unsigned)w->set.batch_bit << 1;
  properties->max_batch_io_size = (unsigned)w->set.max_batch;
  return with(0);
}

CUfileError_t cuFileSetParameterBool(int which, bool value) {
  World *w = world;
  if (fail_code) return with(failing());
  if (w->users) return with(DRIVER_ALREADY_OPEN);
  if (which == 1) w->allow_compat = value;
  return with(0);
}

CUfileError_t cuFileGetParameterBool(int which, bool *value) {
  World *w = world;
  if (fail_code) return with(failing());
  *value = which == 2 ? w->set.force_compat : which == 1 && w->allow_compat;
  return with(0);
}

CUfileError_t cuFileGetStatsLevel(int *level) {
  *level = world->stats_level;
  return with(failing());
}

CUfileError_t cuFileSetStatsLevel(int level) {
  world->stats_level = level;
  return with(failing());
}

CUfileError_t cuFileStatsStart(void) { return with(failing()); }
CUfileError_t cuFileStatsStop(void) { return with(failing()); }
CUfileError_t cuFileStatsReset(void) { return with(failing()); }

CUfileError_t cuFileGetStatsL1(CUfileStatsLevel1_t *stats) {
  World *w = world;
  if (fail_code) return with(failing());
  memset(stats, 0, sizeof *stats);
  pthread_mutex_lock(&w->lock);
  if (w->stats_level > 0) {
    *(w->set.p2p ? &stats->batch_p2p_submit_ops.ok : &stats->batch_nvfs_submit_ops.ok) =
        w->direct_count;
    stats->batch_posix_enqueued_ops.ok = w->host_count;
  }
  pthread_mutex_unlock(&w->lock);
  return with(0);
}

/* --- files and memory */

CUfileError_t cuFileHandleRegister(CUfileHandle_t *handle, const CUfileDescr_t *descriptor) {
  World *w = world;
  if (fail_code) return with(failing());
  if (!w->users) return with(DRIVER_NOT_INITIALIZED);
  if (descriptor->type != 1) return with(INVALID_VALUE);
  if (!w->allow_compat && !w->set.direct) return with(IO_NOT_SUPPORTED);
  /* One of its own, without O_DIRECT: cuFile takes sizes that are no whole blocks. */
  char name[64];
  snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor->handle.fd);
  int fd = open(name, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return with(errno);
  File *file = malloc(sizeof *file);
  file->fd = fd;
  pthread_mutex_lock(&w->lock);
  file->next = w->files, w->files = file;
  pthread_mutex_unlock(&w->lock);
  *handle = file;
  return with(0);
}

void cuFileHandleDeregister(CUfileHandle_t handle) {
  World *w = world;
  if (failing()) return;
  pthread_mutex_lock(&w->lock);
  File **at = &w->files;
  while (*at && *at != handle) at = &(*at)->next;
  if (!*at) {
    note(w, "a handle that is not registered was given up");
  } else {
    File *file = *at;
    if (in_use(w, file, NULL, 0)) note(w, "handle given up under a read");
    *at = file->next;
    close(file->fd);
    free(file);
  }
  pthread_mutex_unlock(&w->lock);
}

CUfileError_t cuFileBufRegister(const void *base, size_t size, int flags) {
  World *w = world;
  int code = failing();
  (void)flags;
  if (!w->users) return with(DRIVER_NOT_INITIALIZED);
  if (!code && w->set.register_fails) code = GPU_MEMORY_PINNING_FAILED;
  Region *region = malloc(sizeof *region);
  region->base = base, region->size = size, region->registered = !code;
  pthread_mutex_lock(&w->lock);
  region->next = w->regions, w->regions = region;
  pthread_mutex_unlock(&w->lock);
  return with(code);
}

CUfileError_t cuFileBufDeregister(const void *base) {
  World *w = world;
  if (fail_code) return with(failing());
  int code = INVALID_VALUE;
  pthread_mutex_lock(&w->lock);
  for (Region **at = &w->regions; *at; at = &(*at)->next)
    if ((*at)->base == base && (*at)->registered) {
      Region *region = *at;
      if (in_use(w, NULL, base, region->size)) note(w, "memory given up under a read");
      *at = region->next;
      free(region);
      code = 0;
      break;
    }
  pthread_mutex_unlock(&w->lock);
  return with(code);
}

/* --- reads */

static ssize_t failed(int code) {
  if (code >= 5000) return -code;
  errno = code;
  return -1;
}

ssize_t cuFileRead(CUfileHandle_t handle, void *base, size_t size, off_t offset, off_t base_offset) {
  World *w = world;
  if (fail_code) return failed(failing());
  Fault fault = n_next_faults ? next_faults[0] : (Fault){NONE, 0};
  n_next_faults = 0;
  pthread_mutex_lock(&w->lock);
  File *file = file_of(w, handle);
  char *to = target(w, base, base_offset, size);
  Entry entry = {.copy = {.u.batch = {base, offset, base_offset, size}, .fh = handle}, .fault = fault};
  Batch batch = {.entries = &entry};
  entry.batch = &batch, entry.is_call = true;
  batch.next = w->batches, w->batches = &batch;
  while (entry.fault.kind == NEVER) pthread_cond_wait(&w->changed, &w->lock);
  ssize_t moved;
  if (!file || !to)
    moved = failed(file ? INVALID_VALUE : HANDLE_NOT_REGISTERED);
  else if (fault.kind == ERROR)
    moved = failed(fault.value > 0 ? (int)fault.value : IO_ERROR);
  else if (fault.kind == STATUS)
    moved = failed(IO_ERROR);
  else if ((moved = transfer(w, file->fd, to, size, offset, fault)) < 0)
    moved = failed((int)-moved);
  Batch **at = &w->batches;
  while (*at != &batch) at = &(*at)->next;
  *at = batch.next;
  int saved = errno;
  pthread_mutex_unlock(&w->lock);
  errno = saved;
  return moved;
}

ssize_t cuFileWrite(CUfileHandle_t handle, const void *base, size_t size, off_t offset, off_t at) {
  (void)handle, (void)base, (void)size, (void)offset, (void)at;
  return failed(IO_NOT_SUPPORTED); /* the engine reads only */
}

static Batch *batch_of(World *w, CUfileBatchHandle_t handle) {
  for (Batch *b = w->batches; b; b = b->next)
    if (b == handle) return b;
  note(w, "a batch that is not there was used");
  return NULL;
}

CUfileError_t cuFileBatchIOSetUp(CUfileBatchHandle_t *handle, unsigned capacity) {
  World *w = world;
  if (fail_code) return with(failing());
  if (!w->users) return with(DRIVER_NOT_INITIALIZED);
  if (capacity > (unsigned)w->set.max_batch) return with(INTERNAL_BATCH_SETUP_ERROR);
  Batch *batch = calloc(1, sizeof *batch);
  batch->capacity = capacity;
  pthread_mutex_lock(&w->lock);
  batch->next = w->batches, w->batches = batch;
  while (w->n_threads < (int)(sizeof w->threads / sizeof *w->threads))
    pthread_create(&w->threads[w->n_threads++], NULL, work, w);
  pthread_mutex_unlock(&w->lock);
  *handle = batch;
  return with(0);
}

/* What entries are made of before any of them is taken: a submission is taken whole or not at all. */
static int refusal(World *w, Batch *batch, unsigned n, const CUfileIOParams_t *params) {
  if (!w->set.batches) return IO_NOT_SUPPORTED;
  if (!batch) return INVALID_CONTEXT_ERROR;
  if (n > batch->capacity) return BATCH_FULL;
  for (Entry *e = batch->entries; e; e = e->next)
    if (unfinished(e)) {
      note(w, "a batch was submitted twice");
      break;
    }
  if (batch->cancelled && w->set.after_cancel == REFUSED) return IO_NOT_SUPPORTED;
  for (unsigned i = 0; i < n; ++i) {
    const CUfileIOParams_t *p = &params[i];
    if (p->mode != 1 || p->opcode != 0 || !file_of(w, p->fh)) {
      note(w, "entry %u is not a read of an open file", i);
      return INVALID_VALUE;
    }
    if (!target(w, p->u.batch.devPtr_base, p->u.batch.devPtr_offset, p->u.batch.size))
      return INVALID_VALUE;
  }
  return 0;
}

CUfileError_t cuFileBatchIOSubmit(CUfileBatchHandle_t handle, unsigned n, CUfileIOParams_t *params,
                                  unsigned flags) {
  World *w = world;
  (void)flags;
  if (fail_code) return with(failing());
  pthread_mutex_lock(&w->lock);
  Batch *batch = batch_of(w, handle);
  int code = refusal(w, batch, n, params);
  if (!code) {
    batch->stale |= batch->cancelled && w->set.after_cancel == STALE;
    batch->cancelled = false;
  }
  Entry **end = batch ? &batch->entries : NULL;
  while (end && *end) end = &(*end)->next;
  for (unsigned i = 0; !code && i < n; ++i) {
    Entry *e = calloc(1, sizeof *e);
    e->batch = batch, e->params = &params[i];
    memcpy(&e->copy, &params[i], sizeof e->copy);
    if (i < n_next_faults) e->fault = next_faults[i];
    e->polls_left = e->fault.kind == LATE ? (int)e->fault.value : 0;
    e->reports = e->fault.kind == TWICE ? 2 : 1;
    *end = e, end = &e->next;
  }
  n_next_faults = 0;
  pthread_cond_broadcast(&w->changed);
  pthread_mutex_unlock(&w->lock);
  return with(code);
}

/* Entries that a status call may report; each look makes late ones less late. */
static unsigned look(Batch *batch, bool counts) {
  unsigned ready = 0;
  for (Entry *e = batch->entries; e; e = e->next) {
    if (!e->done) continue;
    if (e->polls_left > 0)
      e->polls_left -= counts;
    else
      ++ready;
  }
  return ready;
}

CUfileError_t cuFileBatchIOGetStatus(CUfileBatchHandle_t handle, unsigned least, unsigned *n,
                                     CUfileIOEvents_t *events, struct timespec *timeout) {
  World *w = world;
  if (fail_code) return with(failing());
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_sec += timeout->tv_sec, until.tv_nsec += timeout->tv_nsec;
  if (until.tv_nsec >= 1000000000) ++until.tv_sec, until.tv_nsec -= 1000000000;
  pthread_mutex_lock(&w->lock);
  Batch *batch = batch_of(w, handle);
  if (!batch) {
    pthread_mutex_unlock(&w->lock);
    return with(INVALID_CONTEXT_ERROR);
  }
  unsigned ready = look(batch, true), room = *n;
  while (ready < least && pthread_cond_timedwait(&w->changed, &w->lock, &until) == 0)
    ready = look(batch, true);
  *n = 0;
  if (w->set.few_is_error && ready < least) {
    pthread_mutex_unlock(&w->lock);
    return with(INTERNAL_BATCH_GETSTATUS_ERROR);
  }
  if (w->set.order == RANDOM && ready > 1) ready = (ready + 1) / 2;
  for (Entry **at = &batch->entries; *at && *n < room && *n < ready;) {
    Entry *e = *at;
    if (!e->done || e->polls_left > 0) {
      at = &e->next;
      continue;
    }
    events[*n].cookie = e->copy.cookie, events[*n].status = e->status;
    events[*n].ret = (size_t)e->ret;
    ++*n;
    e->over = true;
    if (--e->reports > 0) {
      at = &e->next;
      continue;
    }
    *at = e->next;
    free(e);
  }
  pthread_mutex_unlock(&w->lock);
  return with(0);
}

CUfileError_t cuFileBatchIOCancel(CUfileBatchHandle_t handle) {
  World *w = world;
  if (fail_code) return with(failing());
  pthread_mutex_lock(&w->lock);
  Batch *batch = batch_of(w, handle);
  if (batch) batch->cancelled = true;
  pthread_cond_broadcast(&w->changed);
  pthread_mutex_unlock(&w->lock);
  return with(batch ? 0 : INVALID_CONTEXT_ERROR);
}

void cuFileBatchIODestroy(CUfileBatchHandle_t handle) {
  World *w = world;
  if (failing()) return;
  pthread_mutex_lock(&w->lock);
  Batch *batch = batch_of(w, handle), **at = &w->batches;
  if (batch) {
    bool busy = false;
    for (Entry *e = batch->entries; e; e = e->next) busy |= unfinished(e);
    if (busy) note(w, "a busy batch was destroyed");
    while (*at != batch) at = &(*at)->next;
    *at = batch->next;
    for (Entry *e = batch->entries, *next; e && !busy; e = next) next = e->next, free(e);
    if (!busy) free(batch);
  }
  pthread_mutex_unlock(&w->lock);
}
