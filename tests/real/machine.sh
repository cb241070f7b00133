#!/bin/bash
# The inside of machine.py: from a process of the host to a systemd that is PID 1 of namespaces of its own.
#
#   machine.sh hold FOLDER [PATH...]   in a private mount namespace: keeps the disk, boots, and boots again after a
#                                      reboot; ends with the machine
#   machine.sh boot FOLDER [PATH...]   as the first process of new namespaces: builds the root and becomes systemd
#
# FOLDER gets disk/ and root/ (mount points) and the file pid (the first process, as the host numbers it). Each PATH is
# shown inside, read-only, where it lies on the host. Every mount is in a private namespace and every process dies with
# the one that started it, so nothing outlives a SIGKILL.
set -euo pipefail
stage=$1 folder=$2
shift 2

hold() {
    mount --make-rprivate /
    mkdir -p "$folder/disk" "$folder/root"
    mount -t tmpfs -o mode=0755 machine "$folder/disk"
    mkdir "$folder/disk/written" "$folder/disk/work"
    local status=129
    # The kernel ends the first process of a pid namespace with SIGHUP for a reboot, with SIGINT for a power-off.
    while [ "$status" = 129 ]; do
        status=0
        setpriv --pdeathsig KILL unshare --fork --kill-child=KILL --pid --mount --uts --ipc --cgroup --propagation private \
            bash "$0" boot "$folder" "$@" || status=$?
    done
    [ "$status" = 130 ]
}

boot() {
    local root=$folder/root path host
    read -r host _ </proc/self/stat    # this shell is 1 in here, but /proc is still the host's
    mount -t overlay -o "lowerdir=/,upperdir=$folder/disk/written,workdir=$folder/disk/work" machine "$root"
    kernel_trees "$root"
    devices "$root/dev"
    [ -e "$root/etc/machine-is-set-up" ] || set_up "$root"
    for path in "$@"; do
        mkdir -p "$root$path"
        mount --bind "$path" "$root$path"
        mount -o remount,bind,ro "$root$path"
    done
    printf '%s\n' "$host" >"$folder/pid.new"
    mv "$folder/pid.new" "$folder/pid"
    mkdir -p "$root/was"
    cd "$root"
    pivot_root . was
    umount --lazy /was
    mount --make-rshared /    # a container's starter does this, not systemd; credentials and namespaces need it
    # No clock, module or raw device of the host can be touched from inside.
    exec setpriv --bounding-set -sys_time,-sys_module,-sys_rawio,-wake_alarm --inh-caps -all \
        env --ignore-environment container=machine PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        /lib/systemd/systemd --system --unit=multi-user.target </dev/null
}

kernel_trees() {
    local root=$1 part
    mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
    for part in sys sysrq-trigger irq bus; do
        [ ! -e "$root/proc/$part" ] || mount --bind "$root/proc/$part" "$root/proc/$part"
        [ ! -e "$root/proc/$part" ] || mount -o remount,bind,ro,nosuid,nodev,noexec "$root/proc/$part"
    done
    mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$root/sys"
    mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "$root/sys/fs/cgroup"    # from our own group downwards
    mkdir -p "$root/run" "$root/tmp"
    mount -t tmpfs -o nosuid,nodev,mode=0755 run "$root/run"
    mount -t tmpfs -o nosuid,nodev,mode=1777 tmp "$root/tmp"
}

devices() {
    local dev=$1 node
    mount -t tmpfs -o nosuid,mode=0755 dev "$dev"
    for node in null:3 zero:5 full:7 random:8 urandom:9; do
        mknod -m 0666 "$dev/${node%:*}" c 1 "${node#*:}"
    done
    mknod -m 0666 "$dev/tty" c 5 0
    mkdir "$dev/pts" "$dev/shm" "$dev/mqueue"
    mount -t devpts -o newinstance,nosuid,noexec,mode=0620,gid=5,ptmxmode=0666 devpts "$dev/pts"
    mount -t tmpfs -o nosuid,nodev,mode=1777 shm "$dev/shm"
    ln -s pts/ptmx "$dev/ptmx"
    ln -s /proc/self/fd "$dev/fd"
    for node in 0:stdin 1:stdout 2:stderr; do
        ln -s "/proc/self/fd/${node%:*}" "$dev/${node#*:}"
    done
}

# Once per machine: none of the host's own services start, the journal stays in memory and drops nothing.
set_up() {
    local etc=$1/etc unit
    rm -f "$etc"/rc[0-9S].d/S* "$etc/fstab"
    mkdir -p "$etc"/systemd/{system,journald.conf.d,system.conf.d} "$etc/tmpfiles.d"
    find "$etc/systemd/system" -mindepth 2 -path '*.wants/*' -type l -delete
    for unit in getty.target console-getty.service systemd-firstboot.service systemd-pstore.service \
        dev-hugepages.mount systemd-tmpfiles-clean.timer; do
        ln -sf /dev/null "$etc/systemd/system/$unit"
    done
    ln -sf /dev/null "$etc/tmpfiles.d/tmp.conf"    # Debian's empties /tmp at boot, folders bound below it included
    printf '[Journal]\nStorage=volatile\nReadKMsg=no\nAudit=no\nRateLimitIntervalSec=0\n' \
        >"$etc/systemd/journald.conf.d/90-machine.conf"
    printf '[Manager]\nShowStatus=no\n' >"$etc/systemd/system.conf.d/90-machine.conf"
    echo machine >"$etc/hostname"
    tr -d - </proc/sys/kernel/random/uuid >"$etc/machine-id"
    : >"$etc/machine-is-set-up"
}

"$stage" "$@"
