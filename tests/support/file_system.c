/* A file system that lacks something; loaded with LD_PRELOAD, see tests/storage/test_run_dir.py.

FLOCK            the errno of flock; 0 = every process receives the lock
DIRECTORY_FSYNC  the errno of fsync of a directory
RENAME           the errno of rename
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>

#define CALL_REAL(name, ...) (((__typeof__(&name))dlsym(RTLD_NEXT, #name))(__VA_ARGS__))

int flock(int, int);
int fsync(int);
int rename(const char *, const char *);

static int lacks(const char *what) {
    const char *value = getenv(what);
    if (!value) return 0;
    errno = atoi(value);
    return 1;
}

int flock(int file, int operation) {
    if (lacks("FLOCK")) return errno ? -1 : 0;
    return CALL_REAL(flock, file, operation);
}

int fsync(int file) {
    struct stat status;
    if (!fstat(file, &status) && S_ISDIR(status.st_mode) && lacks("DIRECTORY_FSYNC")) return -1;
    return CALL_REAL(fsync, file);
}

int rename(const char *from, const char *to) {
    if (lacks("RENAME")) return -1;
    return CALL_REAL(rename, from, to);
}
