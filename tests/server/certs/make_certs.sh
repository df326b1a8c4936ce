#!/bin/sh
# Makes the certificates of the tests, valid for a century from 2020 on: a root, two generations of
# a server's certificate, a client's, one that has expired, and those of a root that nobody trusts.
set -e
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
touch "$work/index"
cat > "$work/ca.cnf" << END
[ca]
default_ca = tests
[tests]
database = $work/index
new_certs_dir = $work
rand_serial = yes
unique_subject = no
default_md = sha256
policy = any
[any]
commonName = supplied
[root]
basicConstraints = critical,CA:TRUE
[leaf]
subjectAltName = DNS:localhost,IP:127.0.0.1
END
key() { # name, common name
    openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes \
        -keyout "$1.key" -out "$work/$1.csr" -subj "/CN=$2"
}
sign() { # name, section, end, and how it is signed
    name=$1 section=$2 end=$3
    shift 3
    openssl ca -batch -notext -config "$work/ca.cnf" -extensions "$section" \
        -startdate 20200101000000Z -enddate "$end" -in "$work/$name.csr" -out "$name.pem" "$@"
}
root() {
    key "$1" "$1"
    sign "$1" root 21200101000000Z -selfsign -keyfile "$1.key"
}
leaf() { # name, root, common name, end
    key "$1" "$3"
    sign "$1" leaf "${4:-21200101000000Z}" -cert "$2.pem" -keyfile "$2.key"
}
root root
root stranger
leaf server root "server 1"
leaf renewed root "server 2"
leaf client root client
leaf expired root client 20210101000000Z
leaf intruder stranger intruder
openssl ec -in server.key -aes128 -passout pass:secret -out encrypted.key
rm root.key stranger.key
