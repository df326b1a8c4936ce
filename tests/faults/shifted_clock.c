/* The wall clock of a process, shifted by as many seconds as the file SHIFTED_CLOCK says at that
 * moment: a mapped file of one int64, which a test changes while the process runs.
 *
 * Loaded by LD_PRELOAD. CLOCK_REALTIME is shifted wherever it is read through the C library;
 * monotonic clocks stay, as they do when a machine's time is set. Waits until a time of the wall
 * clock are shifted back for the kernel, whose clock is the real one; a wait that has begun does
 * not see a later change.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t no_shift = 0;
static const volatile int64_t *shift_s = &no_shift;

__attribute__((constructor)) static void map_shift(void)
{
    const char *path = getenv("SHIFTED_CLOCK");
    int fd = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED)
        shift_s = mapped;
    close(fd);
}

/* A function of the library itself, looked up once; a race finds the same address twice. */
static void *own(void **found, const char *name)
{
    if (*found == NULL)
        *found = dlsym(RTLD_NEXT, name);
    return *found;
}
#define OWN(name) ((__typeof__(name) *)own(&own_##name, #name))
static void *own_clock_gettime, *own_pthread_cond_timedwait, *own_sem_timedwait, *own_syscall;

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = OWN(clock_gettime)(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *shift_s;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec precise;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &precise))
        return -1;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *where)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where != NULL)
        *where = now.tv_sec;
    return now.tv_sec;
}

/* Until when the kernel has to wait. Seconds since 1970 are many more than those since the boot,
 * which condition variables of the monotonic clock are given. */
static struct timespec unshifted(const struct timespec *until)
{
    struct timespec shifted_back = *until;
    if (until->tv_sec > 100000000)
        shifted_back.tv_sec -= *shift_s;
    if (shifted_back.tv_sec < 0)
        shifted_back.tv_sec = 0;
    return shifted_back;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until)
{
    struct timespec real = unshifted(until);
    return OWN(pthread_cond_timedwait)(condition, mutex, &real);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until)
{
    struct timespec real = unshifted(until);
    return OWN(sem_timedwait)(semaphore, &real);
}

/* abseil, and with it gRPC, waits by futexes of its own. */
long syscall(long number, ...)
{
    long a[6];
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(arguments, long);
    va_end(arguments);
    struct timespec real;
    if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3] != 0) {
        real = unshifted((const struct timespec *)a[3]);
        a[3] = (long)&real;
    }
    return OWN(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
