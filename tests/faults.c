/* Fails the n-th operation that changes files below a directory; loaded with LD_PRELOAD, see tests/sweep.py.

FAULT_BELOW    the directory
FAULT_AT       n, counted over all processes from 1; "n+" = this and all later ones; 0 = only count
FAULT_WITH     an errno, or "kill": SIGKILL to the process, in the middle of a write
FAULT_COUNTER  file of 8 KiB that holds the count and, once an operation failed, what it was
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { KILL = -1 };
struct counter { _Atomic long n; char what[8184]; };
#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)

static struct counter *counter(void) {
    static struct counter *mapped;
    if (!mapped) {
        int (*real_open)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
        int file = real_open(getenv("FAULT_COUNTER"), O_RDWR | O_CLOEXEC);
        mapped = mmap(NULL, sizeof *mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
    }
    return mapped;
}

/* Return 0, the errno to fail with, or KILL. `path` is relative to the directory `at`; NULL = the file `at` itself. */
static int fault(const char *what, int at, const char *path) {
    const char *below = getenv("FAULT_BELOW"), *when = getenv("FAULT_AT"), *with = getenv("FAULT_WITH");
    char base[PATH_MAX] = "", full[2 * PATH_MAX], link[40];
    if (!below || !when || !with) return 0;
    if (!path || path[0] != '/') {
        snprintf(link, sizeof link, at == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", at);
        if (readlink(link, base, sizeof base - 1) < 0) return 0;
    }
    snprintf(full, sizeof full, "%s%s%s", base, *base && path ? "/" : "", path ? path : "");
    if (strncmp(full, below, strlen(below))) return 0;
    int error = strcmp(with, "kill") ? atoi(with) : KILL;
    if (error == ENOSPC && strchr("uf", what[0])) return 0; /* unlink, fsync: need no space */
    if (error == EMFILE && what[0] != 'o') return 0;
    long n = atomic_fetch_add(&counter()->n, 1) + 1, chosen = atol(when);
    if (!chosen || n < chosen || (n > chosen && when[strlen(when) - 1] != '+')) return 0;
    if (n == chosen) snprintf(counter()->what, sizeof counter()->what, "%s %.4000s", what, full);
    return error;
}

static int fails(const char *what, int at, const char *path) {
    int error = fault(what, at, path);
    if (error == KILL) kill(getpid(), SIGKILL);
    if (error) errno = error;
    return error;
}

#define OPEN(name, declaration, at, ...)                                              \
    int name declaration {                                                            \
        va_list list;                                                                 \
        va_start(list, flags);                                                        \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0;       \
        va_end(list);                                                                 \
        REAL(name);                                                                   \
        if (flags & (O_WRONLY | O_RDWR | O_CREAT) && fails("open", at, path)) return -1; \
        return real(__VA_ARGS__, flags, mode);                                        \
    }
#define CHANGE(name, declaration, what, at, path, ...)  \
    int name declaration {                              \
        REAL(name);                                     \
        if (fails(what, at, path)) return -1;           \
        return real(__VA_ARGS__);                       \
    }
#define WRITE(name, declaration, ...)                   \
    ssize_t name declaration {                          \
        REAL(name);                                     \
        int error = fault("write", file, NULL);         \
        if (error == KILL) {                            \
            size /= 2;                                  \
            real(__VA_ARGS__);                          \
            kill(getpid(), SIGKILL);                    \
        }                                               \
        if (error) return errno = error, -1;            \
        return real(__VA_ARGS__);                       \
    }

OPEN(open, (const char *path, int flags, ...), AT_FDCWD, path)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, path)
OPEN(openat, (int at, const char *path, int flags, ...), at, at, path)
OPEN(openat64, (int at, const char *path, int flags, ...), at, at, path)
WRITE(write, (int file, const void *content, size_t size), file, content, size)
WRITE(pwrite, (int file, const void *content, size_t size, off_t where), file, content, size, where)
WRITE(pwrite64, (int file, const void *content, size_t size, off64_t where), file, content, size, where)
CHANGE(fsync, (int file), "fsync", file, NULL, file)
CHANGE(rename, (const char *from, const char *to), "rename", AT_FDCWD, to, from, to)
CHANGE(unlink, (const char *path), "unlink", AT_FDCWD, path, path)
CHANGE(unlinkat, (int at, const char *path, int flags), "unlink", at, path, at, path, flags)
CHANGE(rmdir, (const char *path), "unlink", AT_FDCWD, path, path)
CHANGE(mkdir, (const char *path, mode_t mode), "mkdir", AT_FDCWD, path, path, mode)
CHANGE(truncate, (const char *path, off_t size), "truncate", AT_FDCWD, path, path, size)
CHANGE(ftruncate, (int file, off_t size), "truncate", file, NULL, file, size)
CHANGE(ftruncate64, (int file, off64_t size), "truncate", file, NULL, file, size)
