/* Preloaded into a process: records, in their order, all changes to files below one folder, and when they were synced.
 *
 * RECORD_ROOT is the folder, RECORD_LOG the file that is written. A record is a head, then path, other and data:
 * see `tests/durability/disk.py`, which reads it. Calls are made one at a time, so that the order is the true one.
 * What could not be recorded (a file that is mapped to be written, say) is recorded as BAD, and the reader refuses it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, TRUNCATE, WRITE, RENAME, UNLINK, MKDIR, RMDIR, SYNC, LINK, MARK, BAD };
enum { LONGEST = 4096 };

static const char *root;
static size_t root_size;
static int log_file = -1;
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
static __thread char tag[256];

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("RECORD_LOG");
    root = getenv("RECORD_ROOT");
    unsetenv("LD_PRELOAD");
    if (path == NULL || root == NULL) return;
    root = strdup(root);
    root_size = strlen(root);
    log_file = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
}

static void note(uint32_t op, const char *path, const char *other, int64_t at, const void *data, size_t size) {
    struct {
        uint32_t op, path, other, data;
        int64_t at;
    } head = {op, (uint32_t)strlen(path), (uint32_t)strlen(other), (uint32_t)size, at};
    struct iovec parts[] = {{&head, sizeof head}, {(void *)path, head.path}, {(void *)other, head.other}, {(void *)data, size}};
    size_t all = sizeof head + head.path + head.other + size;
    if (syscall(SYS_writev, log_file, parts, 4) != (ssize_t)all) abort();
}

static int below(const char *path) {
    return log_file >= 0 && strncmp(path, root, root_size) == 0 && (path[root_size] == '/' || path[root_size] == 0);
}

/* The path of an open file; 0 where it is none of ours. */
static int of(int file, char *path) {
    char link[64];
    ssize_t size;
    if (log_file < 0 || file < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    size = syscall(SYS_readlinkat, AT_FDCWD, link, path, LONGEST - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return below(path);
}

/* The same of a name in a folder. */
static int at(int folder, const char *name, char *path) {
    char in[LONGEST];
    if (log_file < 0 || name == NULL) return 0;
    if (name[0] == '/') {
        snprintf(path, LONGEST, "%s", name);
    } else {
        if (folder == AT_FDCWD ? getcwd(in, sizeof in) == NULL : !of(folder, in)) return 0;
        if ((size_t)snprintf(path, LONGEST, "%s/%s", in, name) >= LONGEST) return 0;
    }
    return below(path);
}

#define RECORDED(condition, call, record)               \
    do {                                                \
        long found;                                     \
        int error;                                      \
        if (!(condition)) return call;                  \
        pthread_mutex_lock(&one_at_a_time);             \
        found = call;                                   \
        error = errno;                                  \
        if (found >= 0) record;                         \
        pthread_mutex_unlock(&one_at_a_time);           \
        errno = error;                                  \
        return found;                                   \
    } while (0)

/* ------------------------------------------------------------------------------------------------ from the tests */

void recorder_tag(const char *text) { snprintf(tag, sizeof tag, "%s", text); }

void recorder_mark(const char *text) {
    if (log_file < 0) return;
    pthread_mutex_lock(&one_at_a_time);
    note(MARK, text, "", 0, "", 0);
    pthread_mutex_unlock(&one_at_a_time);
}

/* ---------------------------------------------------------------------------------------------------------- names */

static int opened(int folder, const char *name, int flags, mode_t mode) {
    char path[LONGEST];
    int file, error, there, ours = (flags & (O_CREAT | O_TRUNC)) && at(folder, name, path);
    if (!ours) return (int)syscall(SYS_openat, folder, name, flags, mode);
    pthread_mutex_lock(&one_at_a_time);
    there = syscall(SYS_faccessat, AT_FDCWD, path, F_OK) == 0;
    file = (int)syscall(SYS_openat, folder, name, flags, mode);
    error = errno;
    if (file >= 0 && !there) note(CREATE, path, "", 0, "", 0);
    else if (file >= 0 && (flags & O_TRUNC)) note(TRUNCATE, path, "", 0, "", 0);
    pthread_mutex_unlock(&one_at_a_time);
    errno = error;
    return file;
}

#define MODE(flags, mode)                               \
    mode_t mode = 0;                                    \
    if ((flags) & O_CREAT) {                            \
        va_list more;                                   \
        va_start(more, flags);                          \
        mode = va_arg(more, mode_t);                    \
        va_end(more);                                   \
    }

#define OPEN(function)                                                       \
    int function(const char *name, int flags, ...) {                         \
        MODE(flags, mode)                                                    \
        return opened(AT_FDCWD, name, flags, mode);                          \
    }
#define OPENAT(function)                                                     \
    int function(int folder, const char *name, int flags, ...) {             \
        MODE(flags, mode)                                                    \
        return opened(folder, name, flags, mode);                            \
    }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)

int __open_2(const char *name, int flags) { return opened(AT_FDCWD, name, flags, 0); }
int __open64_2(const char *name, int flags) { return opened(AT_FDCWD, name, flags, 0); }
int creat(const char *name, mode_t mode) { return opened(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *name, mode_t mode) { return creat(name, mode); }

int renameat2(int from, const char *name, int to, const char *other, unsigned flags) {
    char path[LONGEST], target[LONGEST];
    int ours = at(from, name, path), theirs = at(to, other, target);
    RECORDED(ours || theirs, syscall(SYS_renameat2, from, name, to, other, flags),
             note(ours && theirs && !flags ? RENAME : BAD, path, target, 0, "", 0));
}
int renameat(int from, const char *name, int to, const char *other) { return renameat2(from, name, to, other, 0); }
int rename(const char *name, const char *other) { return renameat2(AT_FDCWD, name, AT_FDCWD, other, 0); }

int unlinkat(int folder, const char *name, int flags) {
    char path[LONGEST];
    RECORDED(at(folder, name, path), syscall(SYS_unlinkat, folder, name, flags),
             note(flags & AT_REMOVEDIR ? RMDIR : UNLINK, path, "", 0, "", 0));
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdirat(int folder, const char *name, mode_t mode) {
    char path[LONGEST];
    RECORDED(at(folder, name, path), syscall(SYS_mkdirat, folder, name, mode), note(MKDIR, path, "", 0, "", 0));
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

int linkat(int from, const char *name, int to, const char *other, int flags) {
    char path[LONGEST], target[LONGEST];
    int ours = at(from, name, path), theirs = at(to, other, target);
    RECORDED(ours || theirs, syscall(SYS_linkat, from, name, to, other, flags),
             note(ours && theirs ? LINK : BAD, path, target, 0, "", 0));
}
int link(const char *name, const char *other) { return linkat(AT_FDCWD, name, AT_FDCWD, other, 0); }

int symlinkat(const char *to, int folder, const char *name) {
    char path[LONGEST];
    RECORDED(at(folder, name, path), syscall(SYS_symlinkat, to, folder, name), note(BAD, path, "symlink", 0, "", 0));
}
int symlink(const char *to, const char *name) { return symlinkat(to, AT_FDCWD, name); }

/* -------------------------------------------------------------------------------------------------------- contents */

ssize_t write(int file, const void *data, size_t size) {
    char path[LONGEST];
    RECORDED(of(file, path), syscall(SYS_write, file, data, size),
             note(WRITE, path, "", lseek(file, 0, SEEK_CUR) - found, data, (size_t)found));
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t where) {
    char path[LONGEST];
    RECORDED(of(file, path), syscall(SYS_pwrite64, file, data, size, where),
             note(WRITE, path, "", where, data, (size_t)found));
}
ssize_t pwrite(int file, const void *data, size_t size, off_t where) { return pwrite64(file, data, size, where); }

/* One part after the other: callers have to reckon with a short write. */
ssize_t writev(int file, const struct iovec *parts, int count) {
    char path[LONGEST];
    if (!of(file, path)) return syscall(SYS_writev, file, parts, count);
    return count > 0 ? write(file, parts[0].iov_base, parts[0].iov_len) : 0;
}
ssize_t pwritev(int file, const struct iovec *parts, int count, off_t where) {
    char path[LONGEST];
    if (!of(file, path)) return syscall(SYS_pwritev, file, parts, count, where, 0L);
    return count > 0 ? pwrite64(file, parts[0].iov_base, parts[0].iov_len, where) : 0;
}
ssize_t pwritev64(int file, const struct iovec *parts, int count, off64_t where) { return pwritev(file, parts, count, where); }

int ftruncate64(int file, off64_t size) {
    char path[LONGEST];
    RECORDED(of(file, path), syscall(SYS_ftruncate, file, size), note(TRUNCATE, path, "", size, "", 0));
}
int ftruncate(int file, off_t size) { return ftruncate64(file, size); }

int truncate(const char *name, off_t size) {
    char path[LONGEST];
    RECORDED(at(AT_FDCWD, name, path), syscall(SYS_truncate, name, size), note(TRUNCATE, path, "", size, "", 0));
}

/* Nothing is copied in the kernel: who asks for it falls back on reading and writing. */
ssize_t sendfile64(int to, int from, off64_t *where, size_t size) {
    char path[LONGEST];
    if (!of(to, path)) return syscall(SYS_sendfile, to, from, where, size);
    errno = EINVAL;
    return -1;
}
ssize_t sendfile(int to, int from, off_t *where, size_t size) { return sendfile64(to, from, (off64_t *)where, size); }

ssize_t copy_file_range(int from, off64_t *where, int to, off64_t *there, size_t size, unsigned flags) {
    char path[LONGEST];
    if (!of(to, path)) return syscall(SYS_copy_file_range, from, where, to, there, size, flags);
    errno = EINVAL;
    return -1;
}

int fallocate64(int file, int mode, off64_t where, off64_t size) {
    char path[LONGEST];
    RECORDED(of(file, path), syscall(SYS_fallocate, file, mode, where, size), note(BAD, path, "fallocate", 0, "", 0));
}
int fallocate(int file, int mode, off_t where, off_t size) { return fallocate64(file, mode, where, size); }

/* SQLite's -shm is mapped; nothing in it has to last. */
void *mmap64(void *address, size_t size, int protection, int flags, int file, off64_t where) {
    char path[LONGEST];
    if (!(flags & MAP_ANONYMOUS) && (flags & MAP_SHARED) && (protection & PROT_WRITE) && of(file, path)) {
        const char *end = strrchr(path, '-');
        if (end == NULL || strcmp(end, "-shm") != 0) {
            pthread_mutex_lock(&one_at_a_time);
            note(BAD, path, "mmap", 0, "", 0);
            pthread_mutex_unlock(&one_at_a_time);
        }
    }
    return (void *)syscall(SYS_mmap, address, size, protection, flags, file, where);
}
void *mmap(void *address, size_t size, int protection, int flags, int file, off_t where) {
    return mmap64(address, size, protection, flags, file, where);
}

/* ------------------------------------------------------------------------------------------------------ to the disk */

int fsync(int file) {
    char path[LONGEST];
    RECORDED(of(file, path), syscall(SYS_fsync, file), note(SYNC, path, tag, 0, "", 0));
}
int fdatasync(int file) {
    char path[LONGEST];
    RECORDED(of(file, path), syscall(SYS_fdatasync, file), note(SYNC, path, tag, 0, "", 0));
}
