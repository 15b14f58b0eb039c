// What machine code in a build may try. Each function returns 0 if it could, -errno if it was refused.
// docs/threats.md has the list of them with what happens; test_hostile_code.py compares the two.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/ioprio.h>
#include <mqueue.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/timex.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

extern char **environ;

int service, victim, segment;            // processes; a System V segment of the service's user
char secret[512], outside[512], own[512];  // a file and a folder of others; the worker's folder
#define KEY 0x526f6c6c

static long made(long result) { return result == -1 ? -errno : 0; }

static long opened(const char *path, int flags) {
  long result = open(path, flags | O_CLOEXEC, 0600);
  return made(result);
}

static const char *of(int pid, const char *name) {
  static char path[64];
  snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
  return path;
}

static const char *in(const char *folder, const char *name) {
  static char path[1024];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  return path;
}

static long child_of(long pid) {  // a child lives on
  if (pid == 0) for (;;) pause();
  return made(pid);
}

// processes
long fork_child(void) { return child_of(fork()); }
long vfork_child(void) {
  long pid = syscall(SYS_clone, CLONE_VM | CLONE_VFORK | SIGCHLD, 0, 0, 0, 0);
  return pid == 0 ? (_exit(0), 0) : made(pid);
}
long clone_child(void) { return child_of(syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0)); }
long clone_of_parent(void) { return child_of(syscall(SYS_clone, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0)); }
long clone_namespace(void) { return child_of(syscall(SYS_clone, CLONE_NEWUSER | CLONE_NEWPID | SIGCHLD, 0, 0, 0, 0)); }
long clone3_child(void) {
  unsigned long arguments[11] = {0};
  arguments[4] = SIGCHLD;
  return child_of(syscall(SYS_clone3, arguments, sizeof arguments));
}
long double_fork(void) {
  pid_t pid = fork();
  if (pid == 0) {
    setsid();
    if (fork() == 0) for (;;) pause();
    _exit(0);
  }
  return made(pid);
}
long daemon_process(void) { return made(daemon(0, 0)); }
long fork_bomb(void) {
  long made_any = -EAGAIN;
  for (int i = 0; i < 3000; i++) {
    long result = child_of(fork());
    if (made_any != 0) made_any = result;
  }
  return made_any;
}
long children_with_memory(void) {
  long result = -EAGAIN;
  for (int i = 0; i < 4; i++) {
    pid_t pid = fork();
    if (pid == 0) {
      char *block = malloc(700u << 20);
      if (block) memset(block, 1, 700u << 20);
      for (;;) pause();
    }
    result = made(pid);
  }
  return result;
}
long spawn_program(void) {
  char *arguments[] = {"/bin/sleep", "600", 0};
  pid_t pid;
  return -posix_spawn(&pid, arguments[0], 0, 0, arguments, environ);
}
long shell_command(void) {
  int status = system("sleep 600 &");
  return WIFEXITED(status) && WEXITSTATUS(status) == 127 ? -ECHILD : made(status);
}
long execute(void) {
  char *arguments[] = {"/bin/sleep", "600", 0};
  return made(execv(arguments[0], arguments));
}
long execute_descriptor(void) {
  char *arguments[] = {"sleep", "600", 0};
  return made(syscall(SYS_execveat, AT_FDCWD, "/bin/sleep", arguments, environ, 0));
}
long own_session(void) { return made(setsid()); }
long own_group(void) { return made(setpgid(0, 0)); }

// threads
static void *add_one(void *count) { return __atomic_add_fetch((int *)count, 1, __ATOMIC_SEQ_CST), NULL; }
static void *rest(void *nothing) { for (;;) pause(); return nothing; }
long threads(void) {
  pthread_t all[8];
  int count = 0;
  for (int i = 0; i < 8; i++)
    if (pthread_create(&all[i], 0, add_one, &count)) return -EAGAIN;
  for (int i = 0; i < 8; i++) pthread_join(all[i], 0);
  return count == 8 ? 0 : -ECHILD;
}
long thread_bomb(void) {
  pthread_attr_t small;
  pthread_attr_init(&small);
  pthread_attr_setstacksize(&small, 16384);
  for (;;) {
    pthread_t one;
    if (pthread_create(&one, &small, rest, 0)) usleep(1000);
  }
}

// signals and timers
long kill_service(void) { return made(kill(service, 0)); }
long kill_victim(void) { return made(kill(victim, SIGKILL)); }
long kill_supervisor(void) { return made(kill(getppid(), SIGKILL)); }
long kill_everybody(void) { return made(kill(-1, SIGCONT)); }
long kill_group(void) { return made(kill(0, SIGCONT)); }
long signal_thread(void) { return made(syscall(SYS_tgkill, victim, victim, SIGKILL)); }
long signal_task(void) { return made(syscall(SYS_tkill, victim, SIGKILL)); }
long signal_queue(void) { union sigval value = {0}; return made(sigqueue(victim, SIGKILL, value)); }
long signal_descriptor(void) {
  long descriptor = syscall(SYS_pidfd_open, victim, 0);
  return descriptor < 0 ? made(descriptor) : made(syscall(SYS_pidfd_send_signal, descriptor, SIGKILL, 0, 0));
}
long signal_by_pipe(void) {
  int ends[2];
  if (pipe(ends)) return -errno;
  if (fcntl(ends[0], F_SETSIG, SIGKILL) || fcntl(ends[0], F_SETOWN, victim)) return -errno;
  if (fcntl(ends[0], F_SETFL, O_ASYNC)) return -errno;
  return made(close(ends[1]));
}
long signal_by_ioctl(void) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) return -errno;
  return made(ioctl(ends[0], 0x8901, &victim));  // FIOSETOWN
}
long type_on_terminal(void) { return made(ioctl(0, TIOCSTI, "x")); }
long survive_parent(void) { return made(prctl(PR_SET_PDEATHSIG, 0)); }
long hide_from_parent(void) { return made(prctl(PR_SET_DUMPABLE, 0)); }
long ignore_kill(void) { return signal(SIGKILL, SIG_IGN) == SIG_ERR ? -errno : 0; }
long timer(void) {
  struct itimerval soon = {{3600, 0}, {3600, 0}};
  return made(setitimer(ITIMER_REAL, &soon, 0));
}
long timer_descriptor(void) { return made(timerfd_create(CLOCK_MONOTONIC, 0)); }
long stop_itself(void) { return made(kill(getpid(), SIGSTOP)); }
long close_everything(void) {
  for (int i = 0; i < 4096; i++) close(i);
  for (;;) pause();
}
long spin(void) { for (;;) ; }

// files
long read_secret(void) { return opened(secret, O_RDONLY); }
long write_secret(void) { return opened(secret, O_WRONLY); }
long read_home(void) { return opened(getenv("HOME") ? getenv("HOME") : "/root", O_RDONLY | O_DIRECTORY); }
long read_passwords(void) { return opened("/etc/passwd", O_RDONLY); }
long list_temporary(void) { return opened("/tmp", O_RDONLY | O_DIRECTORY); }
long write_temporary(void) { return opened("/tmp/roller-hostile", O_WRONLY | O_CREAT); }
long write_scratch_of_another(void) { return opened(in(outside, "planted"), O_WRONLY | O_CREAT); }
long remove_secret(void) { return made(unlink(secret)); }
long truncate_secret(void) { return made(truncate(secret, 0)); }
long rename_secret(void) { return made(rename(secret, in(own, "mine"))); }
long link_secret(void) { return made(link(secret, in(own, "hard"))); }
long symlink_secret(void) {
  if (symlink(secret, in(own, "mine"))) return -errno;
  return opened(in(own, "mine"), O_RDONLY);
}
long change_mode(void) { return made(chmod(secret, 0777)); }
long change_mode_of_folder(void) { return made(chmod(outside, 0)); }
long change_owner(void) { return made(chown(secret, getuid(), getgid())); }
long change_time(void) { return made(utimensat(AT_FDCWD, secret, 0, 0)); }
long change_attribute(void) { return made(setxattr(secret, "user.roller", "x", 1, 0)); }
long make_device(void) { return made(mknod(in(own, "device"), S_IFCHR | 0600, 0x0103)); }
long become_root_of_folder(void) { return made(chroot(own)); }
long big_file(void) {
  int file = open(in(own, "big"), O_WRONLY | O_CREAT, 0600);
  return file < 0 ? made(file) : made(pwrite(file, "x", 1, 1l << 30));
}
long long_file(void) {
  int file = open(in(own, "long"), O_WRONLY | O_CREAT, 0600);
  return file < 0 ? made(file) : made(ftruncate(file, (1l << 30) + 1));
}
long reserve_disk(void) {
  int file = open(in(own, "reserved"), O_WRONLY | O_CREAT, 0600);
  return file < 0 ? made(file) : made(fallocate(file, 0, 0, 1 << 20));
}
long many_files(void) {
  char name[32];
  for (int i = 0;; i++) {
    snprintf(name, sizeof name, "file-%d", i);
    close(open(in(own, name), O_WRONLY | O_CREAT, 0600));
    usleep(100);
  }
}
long deep_folders(void) {
  for (int i = 0; i < 1200; i++)
    if (mkdir("deeper", 0700) || chdir("deeper")) return -errno;
  for (;;) pause();
}
long hidden_folder(void) {
  if (mkdir(in(own, "hidden"), 0300)) return -errno;
  return opened(in(own, "hidden/file"), O_WRONLY | O_CREAT);
}
long files_without_name(void) {
  static char block[1 << 20];
  for (;;) {
    int file = open(in(own, "gone"), O_RDWR | O_CREAT, 0600);
    if (file < 0) return made(file);
    for (int i = 0; i < 4; i++)
      if (write(file, block, sizeof block) < 0) return -errno;
    mmap(0, 4096, PROT_READ, MAP_PRIVATE, file, 0);
    unlink(in(own, "gone"));
    close(file);
    usleep(10000);
  }
}
long lock_devices(void) { int file = open("/dev/null", O_RDWR); return made(flock(file, LOCK_EX | LOCK_NB)); }
long watch_files(void) { return made(inotify_init1(0)); }
long watch_mounts(void) { return made(syscall(SYS_fanotify_init, 0, O_RDONLY)); }

// memory
long big_mapping(void) {
  char *block = mmap(0, 3l << 30, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return block == MAP_FAILED ? -errno : 0;
}
long big_heap(void) { return malloc(3l << 30) ? 0 : -errno; }
long shared_mapping(void) {
  void *block = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return block == MAP_FAILED ? -errno : 0;
}
long shared_zeros(void) {
  int zero = open("/dev/zero", O_RDONLY);
  void *block = mmap(0, 1 << 20, PROT_READ, MAP_SHARED, zero, 0);
  return block == MAP_FAILED ? -errno : 0;
}
long memory_file(void) { return made(memfd_create("roller-hostile", 0)); }
long sysv_memory(void) { return made(shmget(KEY, 1 << 20, IPC_CREAT | 0600)); }
long sysv_memory_of_another(void) { return shmat(segment, 0, 0) == (void *)-1 ? -errno : 0; }
long sysv_remove(void) { return made(shmctl(segment, IPC_RMID, 0)); }
long sysv_semaphore(void) { return made(semget(KEY, 1, IPC_CREAT | 0600)); }
long sysv_queue(void) { return made(msgget(KEY, IPC_CREAT | 0600)); }
long posix_memory(void) { return made(shm_open("/roller-hostile", O_RDWR | O_CREAT, 0600)); }
long posix_semaphore(void) { return sem_open("/roller-hostile", O_CREAT, 0600, 1) == SEM_FAILED ? -errno : 0; }
long posix_queue(void) { return made(mq_open("/roller-hostile", O_RDWR | O_CREAT, 0600, 0)); }

// other processes
long trace(void) { return made(ptrace(PTRACE_ATTACH, service, 0, 0)); }
static long copy_memory(long call) {
  char byte;
  struct iovec here = {&byte, 1}, there = {environ, 1};
  return made(syscall(call, service, &here, 1l, &there, 1l, 0l));
}
long read_memory(void) { return copy_memory(SYS_process_vm_readv); }
long write_memory(void) { return copy_memory(SYS_process_vm_writev); }
long open_memory(void) { return opened(of(service, "mem"), O_RDWR); }
long open_environment(void) { return opened(of(service, "environ"), O_RDONLY); }
long open_own_environment(void) { return opened("/proc/self/environ", O_RDONLY); }
long open_supervisor(void) { return opened(of(getppid(), "mem"), O_RDWR); }
long take_descriptor(void) {
  long descriptor = syscall(SYS_pidfd_open, service, 0);
  return descriptor < 0 ? made(descriptor) : made(syscall(SYS_pidfd_getfd, descriptor, 0, 0));
}
long set_affinity(void) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(0, &one);
  return made(sched_setaffinity(victim, sizeof one, &one));
}
long set_own_affinity(void) {
  cpu_set_t all;
  if (sched_getaffinity(0, sizeof all, &all)) return -errno;
  return made(sched_setaffinity(0, sizeof all, &all));
}
long set_priority(void) { return made(setpriority(PRIO_PROCESS, victim, 19)); }
long set_priority_of_user(void) { return made(setpriority(PRIO_USER, 0, 19)); }
long set_scheduler(void) {
  struct sched_param none = {0};
  return made(sched_setscheduler(victim, SCHED_IDLE, &none));
}
long become_realtime(void) {
  struct sched_param first = {1};
  return made(sched_setscheduler(0, SCHED_FIFO, &first));
}
long set_io_priority(void) { return made(syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, victim, 3 << 13)); }
long set_limits_of_another(void) {
  struct rlimit none = {0, 0};
  return made(prlimit(victim, RLIMIT_NOFILE, &none, 0));
}
long raise_own_limits(void) {
  struct rlimit all = {RLIM_INFINITY, RLIM_INFINITY};
  return made(setrlimit(RLIMIT_DATA, &all));
}
long move_memory(void) {
  unsigned long nodes = 1;
  return made(syscall(SYS_migrate_pages, victim, 8l, &nodes, &nodes));
}

// the network
static long made_socket(int family, int kind) { return made(socket(family, kind, 0)); }
long internet_socket(void) { return made_socket(AF_INET, SOCK_STREAM); }
long internet6_socket(void) { return made_socket(AF_INET6, SOCK_DGRAM); }
long unix_socket(void) { return made_socket(AF_UNIX, SOCK_STREAM); }
long netlink_socket(void) { return made_socket(AF_NETLINK, SOCK_RAW); }
long vsock_socket(void) { return made_socket(AF_VSOCK, SOCK_STREAM); }
long packet_socket(void) { return made_socket(AF_PACKET, SOCK_RAW); }
long pair_of_sockets(void) { int ends[2]; return made(socketpair(AF_UNIX, SOCK_STREAM, 0, ends)); }
long pair_of_other_sockets(void) { int ends[2]; return made(socketpair(AF_TIPC, SOCK_STREAM, 0, ends)); }

// the kernel
long ring(void) { return made(syscall(SYS_io_uring_setup, 1, 0)); }
long queue_of_writes(void) { aio_context_t context = 0; return made(syscall(SYS_io_setup, 1, &context)); }
long load_filter(void) { return made(syscall(SYS_bpf, 0, 0, 0)); }
long count_events(void) { return made(syscall(SYS_perf_event_open, 0, service, -1, -1, 0)); }
long handle_faults(void) { return made(syscall(SYS_userfaultfd, 0)); }
long add_key(void) { return made(syscall(SYS_add_key, "user", "roller", "x", 1, -4)); }
long read_keys(void) { return made(syscall(SYS_keyctl, 0, -4, 0, 0, 0)); }
long mount_folder(void) { return made(mount("none", own, "tmpfs", 0, 0)); }
long new_user_namespace(void) { return made(unshare(CLONE_NEWUSER)); }
long new_mount_namespace(void) { return made(unshare(CLONE_NEWNS)); }
long join_namespace(void) { return made(setns(0, 0)); }
long file_by_handle(void) { return made(syscall(SYS_open_by_handle_at, 0, 0, 0)); }
long load_module(void) { return made(syscall(SYS_init_module, 0, 0, "")); }
long kernel_log(void) { return made(syscall(SYS_syslog, 3, own, 1)); }
long add_swap(void) { return made(syscall(SYS_swapon, own, 0)); }
long become_another_user(void) { return made(setresuid(54321, 54321, 54321)); }
long set_clock(void) {
  struct timex usual = {.modes = ADJ_TICK, .tick = 10000};  // changes nothing where it is allowed
  return made(adjtimex(&usual));
}
long regain_privileges(void) { return made(prctl(PR_SET_NO_NEW_PRIVS, 0, 0, 0, 0)); }
