/* How many threads this process should use: the cpus of its affinity mask, or fewer if a cgroup
 * limits its time, as containers do. */
#define _GNU_SOURCE /* sched_getaffinity */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "abi/ggrad.h"
#if defined(__linux__)
#include <sched.h>
#endif

enum { PATH_BYTES = 2048 };

/* Up to two words of a small file of a cgroup; how many were read. */
static int read_words(const char *mount, const char *group, const char *name, char first[64], char second[64]) {
    char path[PATH_BYTES];
    const int length = snprintf(path, sizeof path, "%s%s/%s", mount, group, name);
    FILE *file = length < (int)sizeof path ? fopen(path, "r") : NULL;
    if (file == NULL) return 0;
    const int n = fscanf(file, "%63s %63s", first, second);
    fclose(file);
    return n;
}

/* Cpus' worth of time that a cgroup allows; INFINITY if it says nothing.
 * v2: cpu.max holds "quota period" or "max period"; v1: a file each, quota -1 for none. */
static double cpus_of_cgroup(const char *mount, const char *group, bool v2) {
    char quota[64], period[64], rest[64];
    if (v2) {
        if (read_words(mount, group, "cpu.max", quota, period) < 2) return INFINITY;
    } else {
        if (read_words(mount, group, "cpu.cfs_quota_us", quota, rest) < 1) return INFINITY;
        if (read_words(mount, group, "cpu.cfs_period_us", period, rest) < 1) return INFINITY;
    }
    const double q = atof(quota), p = atof(period); /* "max" reads as 0 */
    return q > 0 && p > 0 ? q / p : INFINITY;
}

/* The least that a cgroup or any above it allows.  Inside a container the host's path does not exist, and the
 * mount's root is the container's own cgroup: so the walk goes on past what is missing. */
static double cpus_upwards(const char *mount, char *group, bool v2) {
    double least = INFINITY;
    for (;;) {
        if (strcmp(group, "/") == 0) group[0] = '\0';
        least = fmin(least, cpus_of_cgroup(mount, group, v2));
        char *last = strrchr(group, '/');
        if (last == NULL) return least;
        *last = '\0';
    }
}

/* Whether a list of v1 controllers such as "cpu,cpuacct" has "cpu". */
static bool has_cpu(const char *controllers) {
    for (const char *at = controllers; at != NULL; at = strchr(at, ',')) {
        at += *at == ',';
        if (strncmp(at, "cpu", 3) == 0 && (at[3] == ',' || at[3] == '\0')) return true;
    }
    return false;
}

int gg_threads_for(int cpus, const char *root) {
    char path[PATH_BYTES], line[PATH_BYTES], mount[PATH_BYTES];
    double least = cpus;
    const int length = snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *file = length < PATH_BYTES ? fopen(path, "r") : NULL;
    while (file != NULL && fgets(line, sizeof line, file) != NULL) { /* number:controllers:path; v2: none */
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *group = controllers == NULL ? NULL : strchr(++controllers, ':');
        if (group == NULL) continue;
        *group++ = '\0';
        const bool v2 = controllers[0] == '\0';
        if (!v2 && !has_cpu(controllers)) continue;
        snprintf(mount, sizeof mount, "%s/sys/fs/cgroup%s", root, v2 ? "" : "/cpu");
        least = fmin(least, cpus_upwards(mount, group, v2));
    }
    if (file != NULL) fclose(file);
    return least < 1 ? 1 : (int)ceil(least - 1e-9);
}

static int allowed_cpus(void) {
#if defined(__linux__)
    for (int size = 1024; size <= 1 << 20; size *= 2) { /* the mask must be as long as the kernel's */
        cpu_set_t *cpus = CPU_ALLOC(size);
        if (cpus == NULL) break;
        const size_t bytes = CPU_ALLOC_SIZE(size);
        CPU_ZERO_S(bytes, cpus);
        const int n = sched_getaffinity(0, bytes, cpus) == 0 ? CPU_COUNT_S(bytes, cpus) : 0;
        CPU_FREE(cpus);
        if (n > 0) return n;
    }
#endif
    const long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : (int)n;
}

int gg_default_threads(void) { return gg_threads_for(allowed_cpus(), ""); }
