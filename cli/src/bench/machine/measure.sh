# Measures disks and networks of the machine that `dunlin bench machine` makes: PARTS, and SECONDS for each run of fio.
# Each figure is a line "measured name=DEVICE-WHAT value=NUMBER": accesses per second, or KiB per second.
fail() {
    echo "FAILED: $*"
    exit 1
}

# The virtio disk with this serial number.
disk_named() {
    for disk in /sys/block/vd*; do
        [ "$(cat "$disk/serial")" != "$1" ] || echo "/dev/${disk##*/}"
    done
}

# DEVICE NAME HOW SIZE FIELD: a field of fio's terse output, version 3.
measure_disk() {
    fio --name="$3" --rw="$3" --filename="$1" --bs="$4" --ioengine=libaio --iodepth=16 --direct=1 --time_based \
        --runtime="$SECONDS_OF_FIO" --minimal >/tmp/fio 2>/tmp/errors || fail "$2 $3: $(cat /tmp/errors /tmp/fio)"
    echo "measured name=$2-$3 value=$(cut -d ';' -f "$5" /tmp/fio)"
}

# Hundredths of a second. A leading zero would make it octal.
now() {
    read -r up _ </proc/uptime
    up=1${up%.*}${up#*.}
    echo $((up - 1$(printf '%0*d' $((${#up} - 1)) 0)))
}

# NAME WHAT MIB START
tell_speed() {
    echo "measured name=$1-$2 value=$(($3 * 102400 / ($(now) - $4)))"
}

for part in $PARTS; do
    case $part in
    disk)
        # fio comes on a disk of its own, as an archive.
        (cd / && zcat "$(disk_named fio)" 2>/dev/null | cpio -idu 2>/dev/null)
        fio --version >/dev/null || fail 'no fio'
        for disk in virtio:"$(disk_named bench)" nvme:/dev/nvme0n1 ahci:/dev/sda; do
            measure_disk "${disk#*:}" "${disk%%:*}" randread 4k 8
            measure_disk "${disk#*:}" "${disk%%:*}" randwrite 4k 49
            measure_disk "${disk#*:}" "${disk%%:*}" read 128k 7
            measure_disk "${disk#*:}" "${disk%%:*}" write 128k 48
        done
        ;;
    net)
        mib=16
        for card in /sys/class/net/eth*; do
            case $(basename "$(readlink "$card/device/driver")") in
            virtio_net) name=virtio subnet=2 ;;
            e1000e) name=e1000e subnet=3 ;;
            *) continue ;;
            esac
            ip link set "${card##*/}" up && ip address add 10.0.$subnet.15/24 dev "${card##*/}" || fail "$name"
            # An answer means that the link is up.
            tries=0
            until ping -c 1 -W 1 10.0.$subnet.2 >/dev/null; do
                tries=$((tries + 1))
                [ $tries -lt 30 ] || fail "$name: no answer"
            done
            start=$(now)
            bytes=$(nc 10.0.$subnet.100 1 </dev/null | wc -c)
            [ "$bytes" = $((mib << 20)) ] || fail "$name: $bytes bytes have come"
            tell_speed $name receive $mib "$start"
            start=$(now)
            # The other side ends when it has all.
            head -c $((mib << 20)) /dev/zero | nc 10.0.$subnet.100 2
            tell_speed $name send $mib "$start"
        done
        ;;
    esac
done
